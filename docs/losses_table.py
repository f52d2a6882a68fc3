"""Makes src/policyloss/losses.json, which commands read instead of importing torch."""

from __future__ import annotations

import json

import policyloss as pl
from policyloss.catalogue import PRESETS
from policyloss.choose import all_choices


def losses_table() -> str:
    """Every preset and every result of `choose`, one per line."""
    presets = {
        preset.name: {
            "title": preset.title,
            "paper": preset.paper,
            "advantages": pl.explain(preset.name).advantages,
            "spec": preset.spec.to_dict(),
        }
        for preset in PRESETS.values()
    }
    chosen = {}
    for code in sorted({choice.code for choice in all_choices()}):
        spec = eval(code, {"pl": pl})
        chosen[code] = {"reads": list(spec.reads), "spec": spec.to_dict()}
    tables = {"presets": presets, "chosen": chosen}
    lines = [
        f'"{title}": {{\n' + ",\n".join(f"{_json(k)}: {_json(v)}" for k, v in table.items()) + "\n}"
        for title, table in tables.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(data: object) -> str:
    return json.dumps(data, ensure_ascii=False)
