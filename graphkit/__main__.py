"""``python -m graphkit`` is the ``graphkit`` command."""

import sys

from graphkit.cli import main

sys.exit(main())
