"""The conformance suite: what has to hold on every GPU generation, and what ran to show it."""
