"""``lowlat tune``: which backend and config serve a local (N, K) at each token count, found by measuring."""
