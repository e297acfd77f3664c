"""The hardware matrix: which machines serve which GPU generation, what ran there, and what is still to be shown."""
