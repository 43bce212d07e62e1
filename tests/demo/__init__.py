"""The demo's scripts are a folder, not an installed package: these tests see them as `python examples/demo/…` would."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
BUNDLED = ROOT / "cli" / "motet_cli" / "bundled"

if str(DEMO) not in sys.path:
    sys.path.append(str(DEMO))
