"""One process of ``make_all``: reads pickled units from stdin, puts their objects into a store folder."""

from __future__ import annotations

import logging
import pickle
import sys
from pathlib import Path

from .compiling import make
from .store import ObjectStore


def main() -> None:
    # No archives: the parent asks for what they lack, and has said what is wrong with them.
    store = ObjectStore(Path(sys.argv[1]))
    for unit in pickle.load(sys.stdin.buffer):
        try:
            make(unit, store)
        except Exception as error:  # the parent tries it too, and says what is wrong where the user looks
            logging.getLogger("lowlat_gemm").debug("%s: %s", unit, error)


if __name__ == "__main__":
    main()
