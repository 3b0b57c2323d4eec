"""Sixty mistakes that a new user makes, and what the answer to each must have.

Written from README.md and the promised command line alone, before any code was read; a comment says what was corrected
later. ``test_mistakes.py`` runs them.

``code`` is the promised exit code. ``names`` are words that show where the mistake is; ``hint`` are words with which
the user can go on, and none of them is in the command that was typed. Words are compared without case and as whole
words; ``a|b`` asks for one of two. ``files`` are written to the working directory before the command runs (a name that
ends with ``/`` is a folder). ``stage`` names a state that files alone cannot make:

- ``run``: ``run/`` is a run of the quickstart after step 2, with one checkpoint;
- ``damaged``: the same, but its config lacks a key that its format has;
- ``newer``: the same, but its config has format 99;
- ``locked``: the same, and another launcher holds its lock;
- ``copied``: ``mine.yaml`` is a copy of the quickstart recipe with the line ``contxt: 4096`` at its end.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mistake:
    name: str
    command: str  # split as a shell does
    code: int
    names: tuple[str, ...]
    hint: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    stage: str = ""
    count: int = 1  # mistakes in the command; each may take three lines


_DOCUMENTS = '{"text": "one"}\n{"text": "two"}\n'

KEYS = [
    Mistake("group misspelt", "train recipe=quickstart optimzer.lr=1e-4", 2, ("optimzer.lr",), ("optimizer.lr",)),
    Mistake(
        "key misspelt",
        "plan recipe=quickstart cluster.rank_per_node=4",
        2,
        ("cluster.rank_per_node",),
        ("cluster.ranks_per_node",),
    ),
    Mistake("top key misspelt", "plan recipe=quickstart contxt=4096", 2, ("contxt",), ("context",)),
    Mistake("key without its group", "train recipe=quickstart lr=1e-4", 2, ("lr",), ("optimizer.lr",)),
    Mistake("steps without run", "train recipe=quickstart steps=10", 2, ("steps",), ("run.steps",)),
    Mistake("Hydra's plus", "plan recipe=quickstart +run.stepz=1", 2, ("run.stepz",), ("run.steps",)),
    Mistake("underscore for a dot", "plan recipe=quickstart data_path=mine", 2, ("data_path",), ("data.path",)),
    Mistake(
        "two at once",
        "plan recipe=quickstart optimizer.lrr=1 planner=statc",
        2,
        ("optimizer.lrr", "statc"),
        ("optimizer.lr", "static"),
        count=2,
    ),
]

VALUES = [
    Mistake("unknown planner", "plan recipe=quickstart planner=dynamic", 2, ("dynamic",), ("adaptive", "balanced")),
    Mistake("PyTorch's dtype", "train recipe=quickstart dtype=bfloat16", 2, ("dtype",), ("bf16",)),
    Mistake("ZeRO stage 4", "train recipe=quickstart zero.stage=4", 2, ("zero.stage",), ("3",)),
    Mistake("word for a rate", "train recipe=quickstart optimizer.lr=fast", 2, ("optimizer.lr", "fast"), ("number",)),
    Mistake(
        "negative rate",
        "train recipe=quickstart optimizer.lr=-1e-4",
        2,
        ("optimizer.lr",),
        ("positive|above 0|greater than 0|more than 0|> 0|at least 0",),
    ),
    Mistake(
        "no steps", "train recipe=quickstart run.steps=0", 2, ("run.steps",), ("positive|at least 1|1 or more|above 0",)
    ),
    Mistake("ratio over one", "train recipe=quickstart offload.ratio=2", 2, ("offload.ratio",), ("auto", "0", "1")),
    Mistake("cluster without its size", "plan recipe=quickstart cluster=h100", 2, ("h100",), ("h100x8",)),
]

UNITS = [
    Mistake("bytes for tokens", "plan recipe=quickstart context=2MB", 2, ("context", "2MB"), ("2M", "tokens")),
    Mistake("GiB for tokens", "plan recipe=quickstart capacity=8GiB", 2, ("capacity", "8GiB"), ("tokens",)),
    Mistake("letter O for a zero", "plan recipe=quickstart context=4O96", 2, ("context", "4O96"), ("256K|2M|4096|4K",)),
    Mistake(
        "commas in a number",
        "plan recipe=quickstart batch_tokens=1,000,000",
        2,
        ("batch_tokens",),
        ("1000000|1M|without commas|comma|one value",),
    ),
]

FLAGS = [
    Mistake("command misspelt", "trian recipe=quickstart", 2, ("trian",), ("train",)),
    Mistake("subcommand misspelt", "config shwo recipe=quickstart", 2, ("shwo",), ("show",)),
    Mistake(
        "recipe as a flag", "train --recipe quickstart", 2, ("--recipe",), ("recipe=quickstart|KEY=VALUE|recipe=",)
    ),
    Mistake("recipe without its key", "train quickstart", 2, ("quickstart",), ("recipe=quickstart",)),
    Mistake("flag misspelt", "train recipe=quickstart --dryrun", 2, ("--dryrun",), ("--dry-run",)),
    Mistake(
        "key as a flag",
        "train recipe=quickstart --lr 1e-4",
        2,
        ("--lr",),
        ("optimizer.lr|KEY=VALUE|optimizer.lr=1e-4",),
    ),
    Mistake(
        "flag and key differ",
        "train recipe=quickstart --nproc 2 cluster.ranks_per_node=4",
        2,
        ("--nproc", "cluster.ranks_per_node"),
        ("one|either|same",),
    ),
    Mistake("unknown launcher", "train recipe=quickstart --launcher slrum", 2, ("slrum",), ("slurm",)),
    Mistake("shell that is not there", "completion tcsh", 2, ("tcsh",), ("bash", "zsh", "fish")),
    Mistake("prompt left out", "generate run", 2, ("prompt",), ("--prompt",), stage="run"),
]

FILES = [
    Mistake(
        "run folder is a file",
        "train recipe=quickstart run.out=notes.txt",
        73,
        ("notes.txt",),
        ("folder|directory|not a folder|not a directory",),
        files={"notes.txt": "mine\n"},
    ),
    Mistake(
        "resume from nowhere",
        "train recipe=quickstart run.out=out --resume no/such/run",
        5,
        ("no/such/run",),
        ("auto|never|ckpt list",),
    ),
    Mistake(
        "resume from a folder that is no checkpoint",
        "train recipe=quickstart run.out=out --resume notes",
        5,
        ("notes",),
        ("auto|never|ckpt list",),
        files={"notes/": "", "notes/readme.txt": "mine\n"},
    ),
    Mistake(
        "run folder with a damaged config",
        "train recipe=quickstart run.out=run",
        2,  # first written: 5; but its config is what cannot be read, and its checkpoint can be resumed
        ("run/resolved.yaml",),
        ("--resume never|another run.out|another folder|another --out",),
        stage="damaged",
    ),
    Mistake(
        "run folder of a newer version",
        "train recipe=quickstart run.out=run",
        2,
        ("run/resolved.yaml", "99"),
        ("newer",),
        stage="newer",
    ),
    Mistake(
        "report of a newer version",
        "report run",
        2,
        ("run/resolved.yaml", "99"),
        ("newer",),
        stage="newer",
    ),
    Mistake(
        "run folder in use",
        "train recipe=quickstart run.out=run",
        73,
        ("run",),
        ("--out|another folder|another run.out|process|pid|wait",),
        stage="locked",
    ),
    Mistake(
        "report of nothing",
        "report no/such/run",
        2,
        ("no/such/run",),
        ("exist|found|no such|run folder|runs list",),  # first written: without runs list
    ),
    Mistake(
        "import of a folder without a model",
        "ckpt import notes",
        4,
        ("notes",),
        ("config.json",),
        files={"notes/": ""},
    ),
]

HOSTS = [
    Mistake(
        "host twice",
        "train recipe=quickstart --hostfile hosts.txt --dry-run",
        2,
        ("hosts.txt:2|hosts.txt line 2|line 2", "node1"),
        ("twice|once|duplicate|already|slots=16",),
        files={"hosts.txt": "node1 slots=8\nnode1 slots=8\n"},
    ),
    Mistake(
        "slots in words",
        "train recipe=quickstart --hostfile hosts.txt --dry-run",
        2,
        ("hosts.txt:1|line 1", "two"),
        ("number|whole|integer|slots=8",),
        files={"hosts.txt": "node1 slots=two\n"},
    ),
    Mistake(
        "empty hostfile",
        "train recipe=quickstart --hostfile hosts.txt --dry-run",
        2,
        ("hosts.txt",),
        ("no host|no hosts|empty|slots=8",),
        files={"hosts.txt": "# my cluster\n"},
    ),
    Mistake(
        "host that is not there",
        "train recipe=quickstart run.out=out --hostfile hosts.txt",
        3,
        ("nowhere.invalid",),
        ("ssh",),
        files={"hosts.txt": "nowhere.invalid slots=2\n"},
    ),
    Mistake("launcher without hosts", "train recipe=quickstart --launcher hostfile", 2, ("hostfile",), ("--hostfile",)),
]

MESH = [
    Mistake(
        "context over the capacity of all ranks",
        "plan recipe=quickstart context=1M",
        10,  # first written: 2; but what fits nowhere is 10
        ("context",),
        ("capacity",),
    ),
    Mistake(
        "ranks that do not divide",
        "plan recipe=quickstart cluster.ranks_per_node=3 parallel.tp=2",
        2,
        ("3", "parallel.tp"),
        ("divide|divides|divisible|multiple",),
    ),
    Mistake(
        "more devices than heads",
        "train recipe=quickstart parallel.tp=8 --nproc 8",
        2,
        ("parallel.tp", "model.heads"),
        ("parallel.tp=2",),
    ),
    Mistake(
        "model that does not fit",
        "estimate-memory recipe=llama70b-2m cluster.nodes=1",
        10,
        ("GiB",),
        ("--fit|capacity|offload|offload.ratio|cluster.nodes=52",),  # first written: without cluster.nodes
    ),
    Mistake(
        "no cluster here",
        "train recipe=llama7b-2m run.out=out",
        2,  # first written: 3, and GPU; but the missing hostfile comes first
        ("cluster.nodes=128",),
        ("quickstart|--dry-run|plan|simulate",),
    ),
]

DATA = [
    Mistake("no path", "profile-data data=jsonl", 2, ("data.path",), ("data.path",)),
    Mistake(
        "path that is not there",
        "profile-data data=jsonl data.path=mine.jsonl",
        4,
        ("mine.jsonl",),
        ("exist|found|no such",),
    ),
    Mistake(
        "broken line",
        "profile-data data=jsonl data.path=mine.jsonl",
        4,
        ("mine.jsonl:2|line 2",),
        ("JSON",),
        files={"mine.jsonl": '{"text": "one"}\n{"text": "two"\n{"text": "three"}\n'},
    ),
    Mistake(
        "field of another name",
        "profile-data data=jsonl data.path=mine.jsonl",
        4,
        ("text",),
        ("content",),
        files={"mine.jsonl": '{"content": "one"}\n{"content": "two"}\n'},
    ),
    Mistake(
        "empty file",
        "profile-data data=jsonl data.path=mine.jsonl",
        4,
        ("mine.jsonl",),
        ("empty|no document|no documents",),
        files={"mine.jsonl": ""},
    ),
    Mistake(
        "folder without data",
        "profile-data data=jsonl data.path=docs",
        4,
        ("docs",),
        (".jsonl|*.jsonl",),
        files={"docs/": "", "docs/a.txt": "one\n"},
    ),
    Mistake(
        "source misspelt",
        "profile-data data=json data.path=mine.jsonl",
        2,
        ("json",),
        ("data=jsonl|parquet",),
        files={"mine.jsonl": _DOCUMENTS},
    ),
    Mistake("lengths without a file", "plan recipe=llama7b-256k lengths=file", 2, ("lengths.path",), ("lengths.path",)),
    Mistake(
        "word among lengths",
        "plan recipe=llama7b-256k lengths=file lengths.path=lengths.txt",
        4,
        ("lengths.txt:2|line 2",),
        ("whole|integer|number|length",),
        files={"lengths.txt": "4096\nmany\n512\n"},
    ),
]

RECIPES = [
    Mistake("recipe cut short", "train recipe=llama7b", 2, ("llama7b",), ("llama7b-2m|llama7b-256k",)),
    Mistake("recipe misspelt", "recipes show lama70b-2m", 2, ("lama70b-2m",), ("llama70b-2m",)),
    Mistake(
        "file as a recipe",
        "train recipe=mine.yaml",
        2,
        ("mine.yaml",),
        ("defaults",),  # first written: --config; but recipe=FILE is promised too, and what lacks is a base
        files={"mine.yaml": "run:\n  steps: 1\n"},
    ),
    Mistake(
        "misspelt key in a file", "plan --config mine.yaml", 2, ("mine.yaml", "contxt"), ("context",), stage="copied"
    ),
]

MISTAKES = [*KEYS, *VALUES, *UNITS, *FLAGS, *FILES, *HOSTS, *MESH, *DATA, *RECIPES]
