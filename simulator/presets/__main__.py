"""Public measurements into cluster presets: `python -m simulator.presets DATA_DIR` rewrites conf/cluster/*.yaml.

DATA_DIR holds the CSV files that build.py and deepep.py name (columns and units in its README). `local.yaml` is left
alone: it belongs to `semmoe calibrate`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .build import build
from .machines import PRESETS
from .render import render


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print(__doc__)
        return 2
    target = Path(__file__).resolve().parents[2] / "conf" / "cluster"
    for preset in PRESETS:
        raw = build(preset, Path(argv[0]))
        (target / f"{preset.name}.yaml").write_text(render(raw))
        print(f"{preset.name}: {raw['provenance']['experts']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
