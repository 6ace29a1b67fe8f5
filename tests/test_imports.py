"""Which part of the library may import which, and what `import layerskip` must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "layerskip"
# The parts of the library that each part may import beside itself.
ALLOWED = {
    "model": set[str](),
    "decoding": {"model"},
    "training": {"model"},
    "comparison": {"model", "decoding", "training"},
}
# Pure functions: acceptance rules and cost formulas.
PURE = ("acceptance", "cost")
LATE = ("accelerate", "datasets", "peft", "matplotlib", "lm_eval", "bitsandbytes", "torchao")


def imported_modules(source: str, package: str) -> set[str]:
    """Returns the dotted names of all modules that `source`, a module of `package`, imports anywhere, in functions and
    under TYPE_CHECKING too; of `from a import b` both `a` and `a.b`, since b may be a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return found


def forbidden_parts(source: str, part: str) -> set[str]:
    """Returns the parts of the library that `source`, a module of `part`, imports but may not.

    Whatever stands directly in the package counts as one, since it imports the decoding.
    """
    used = {
        name.split(".")[1] for name in imported_modules(source, f"layerskip.{part}") if name.startswith("layerskip.")
    }
    top = {name for name in imported_modules(source, f"layerskip.{part}") if name == "layerskip"}
    return (used & set(ALLOWED)) - ALLOWED[part] - {part} | top


def foreign_modules(source: str, package: str) -> set[str]:
    """Returns the top-level modules that `source` imports, beside torch and the standard library."""
    tops = {name.split(".")[0] for name in imported_modules(source, package)}
    return tops - {"torch"} - set(sys.stdlib_module_names)


def modules_of(part: str) -> list[Path]:
    return sorted((LIBRARY / part).rglob("*.py"))


def is_pure(path: Path) -> bool:
    return any(path.stem == name or path.stem.startswith(f"{name}_") for name in PURE)


PURE_MODULES = [path for path in sorted(LIBRARY.rglob("*.py")) if is_pure(path)]


# The library


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    found = {path: forbidden_parts(path.read_text(encoding="utf-8"), part) for path in modules_of(part)}
    assert {path: parts for path, parts in found.items() if parts} == {}


def test_pure_functions_import_only_torch_and_the_standard_library() -> None:
    for path in PURE_MODULES:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert foreign_modules(path.read_text(encoding="utf-8"), package) == set(), path


def test_the_modules_under_test_are_there() -> None:
    """A control: a folder that was renamed would empty the tests above."""
    assert all(modules_of(part) for part in ALLOWED)
    assert LIBRARY / "decoding" / "acceptance.py" in PURE_MODULES


def test_every_part_of_the_library_has_its_rule() -> None:
    parts = {path.name for path in LIBRARY.iterdir() if path.is_dir() and list(path.rglob("*.py"))}
    assert parts <= set(ALLOWED)


# The checker itself


@pytest.mark.parametrize(
    ("part", "source", "found"),
    [
        ("model", "from layerskip.decoding.loop import DecodeLoop", {"decoding"}),
        ("model", "import layerskip.training.loss", {"training"}),
        ("model", "import layerskip.comparison.table as table", {"comparison"}),
        ("model", "from layerskip import decoding", {"decoding", "layerskip"}),
        ("model", "from layerskip import Engine", {"layerskip"}),
        ("model", "import layerskip", {"layerskip"}),
        ("model", "from ..decoding import loop", {"decoding"}),
        ("model", "from .. import training", {"training", "layerskip"}),
        ("model", "def f():\n    from layerskip.decoding import loop", {"decoding"}),
        ("model", "if TYPE_CHECKING:\n    from layerskip.training import trainer", {"training"}),
        ("decoding", "from layerskip.training import trainer", {"training"}),
        ("decoding", "from layerskip.comparison import quality", {"comparison"}),
        ("training", "from layerskip.decoding.engine import Engine", {"decoding"}),
        ("training", "from layerskip.comparison import quality", {"comparison"}),
    ],
)
def test_the_checker_finds_a_forbidden_import(part: str, source: str, found: set[str]) -> None:
    assert forbidden_parts(source, part) == found


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("model", "import torch\nfrom transformers import Cache"),
        ("model", "from layerskip.model.cache import SharedCache"),
        ("model", "from . import cache\nfrom .cache import SharedCache"),
        ("decoding", "from layerskip.model.cache import SharedCache\nfrom ..model import cache"),
        ("training", "from layerskip.model import layered"),
        ("comparison", "from layerskip.decoding import loop\nfrom layerskip.training import trainer"),
        ("model", "text = 'import layerskip.decoding'"),
    ],
)
def test_the_checker_lets_an_allowed_import_pass(part: str, source: str) -> None:
    assert forbidden_parts(source, part) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nimport math\nfrom collections.abc import Sequence\nfrom __future__ import annotations", set()),
        ("from torch.nn import functional", set()),
        ("from transformers import Cache", {"transformers"}),
        ("def f():\n    import numpy", {"numpy"}),
        ("from layerskip.model import cache", {"layerskip"}),
        ("from .loop import DecodeLoop", {"layerskip"}),
    ],
)
def test_the_checker_of_pure_functions_finds_foreign_modules(source: str, found: set[str]) -> None:
    assert foreign_modules(source, "layerskip.decoding") == found


# Running it


def loaded_by(statement: str) -> set[str]:
    """Returns which of the modules in LATE a fresh interpreter has loaded after `statement`."""
    program = f"{statement}\nimport sys\nprint(*[name for name in {LATE} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_library_loads_none_of_the_heavy_packages() -> None:
    assert loaded_by("import layerskip, layerskip.comparison.plots") == set()


def test_the_check_of_loaded_packages_sees_one() -> None:
    """A control, with a package that loads fast."""
    assert loaded_by("import sys, types\nsys.modules['peft'] = types.ModuleType('peft')") == {"peft"}


@pytest.mark.parametrize("folder", ["training", "inference", "configs"])
def test_folders_of_programs_are_no_packages(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not list((ROOT / folder).rglob("__init__.py"))
