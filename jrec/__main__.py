"""``python -m jrec`` is the ``jrec`` command."""

import sys

from jrec.cli import main

sys.exit(main())
