"""``python -m kvmpi`` is the ``kvmpi`` command."""

import sys

from kvmpi.cli import main

sys.exit(main())
