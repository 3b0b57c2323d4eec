"""The layers of packages, from the command line down to the modules that import no other package of this repository."""

from __future__ import annotations

# Each layer may import those after it. Packages of one layer may import each other, as long as no cycle comes of it.
LAYERS = (
    {"bytescale_cli"},
    {"trainer", "launch", "report", "hardware", "doctor", "tune"},
    {"zero", "offload", "parallel", "attention", "models", "weights"},
    {"remote"},
    {"data", "simulator", "fit", "trackers"},
    {"job"},
    {"planner"},
    {"cost"},
    {"run", "control"},
    {"cluster"},
    {"config"},
    {"family"},
    {
        "close",
        "compiled",
        "dtypes",
        "errors",
        "files",
        "folders",
        "format_number",
        "interrupts",
        "readers",
        "safe_path",
        "selection",
        "tables",
        "units",
    },
)

# Packages whose subpackages have an order too: each may import those after it.
ROOMS = {"launch": ("schedulers", "agents", "checks")}
