"""`ddp_train.py` with imports that take two seconds more."""

import slow_import  # noqa: F401
from ddp_train import main

if __name__ == "__main__":
    main()
