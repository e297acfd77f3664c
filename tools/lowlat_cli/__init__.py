"""The ``lowlat`` command line: what the library would do, whether it can, and whether it does."""
