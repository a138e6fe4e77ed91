"""Runs the ``graphkit`` command as ``python -m graphkit``."""

import sys

from graphkit.cli import main

sys.exit(main())
