"""``python -m stepledger``."""

import sys

from .cli import main

sys.exit(main())
