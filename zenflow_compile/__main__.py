"""``python -m zenflow_compile``."""

import sys

from zenflow_compile.cli import main

sys.exit(main())
