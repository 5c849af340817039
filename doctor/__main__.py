"""python PATH/doctor COMMAND ... is ddp-doctor COMMAND ..., without installing it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ddp_doctor.cli import main

sys.exit(main())
