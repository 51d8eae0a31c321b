"""``python -m zenflow_compile``."""

import sys

from zenflow_compile.cli.main import main

sys.exit(main())
