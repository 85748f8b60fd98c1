"""Every example package, and every skeleton that the wheel's own `pelton plugins new` writes, passes `pelton plugins check` beside
Pelton's wheel, where no source of this repository can be imported.

    python tests/tools/plugins_from_wheel.py               # all of them: minutes
    python tests/tools/plugins_from_wheel.py op no-repeat  # a kind of skeleton, an example

Dependencies come from the environment that runs it; nothing is fetched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = [
    sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
    "--disable-pip-version-check",
]  # fmt: skip
WHEEL = "from hatchling.builders.wheel import WheelBuilder; print(*WheelBuilder({root!r}).build(directory={target!r}))"


def packages(wanted: list[str]) -> tuple[list[Path], list[str]]:
    """The examples, and the kinds of skeletons; of these the wanted ones."""
    from pelton_plugins.commands.plugin_author import kinds

    examples = {path.name.removeprefix("pelton-"): path for path in sorted((ROOT / "examples/plugins").iterdir())}
    unknown = set(wanted) - examples.keys() - kinds().keys()
    if unknown:
        raise SystemExit(f"There is no {min(unknown)!r}; there is {', '.join([*examples, *kinds()])}.")
    found = [path for name, path in examples.items() if not wanted or name in wanted]
    return found, [kind for kind in kinds() if not wanted or kind in wanted]


def run(python: Path, site: Path, *command: str, plugins: str = "") -> subprocess.CompletedProcess[str]:
    """plugins: what `PELTON_PLUGINS` names; the other packages are as if they were not there."""
    path = os.pathsep.join(
        [str(site), sysconfig.get_path("purelib")]
    )  # whose .pth files, editable installs, are not read
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PELTON_PLUGINS": plugins}
    return subprocess.run([python, *command], capture_output=True, text=True, cwd=site, env=environ)


def main(wanted: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder, site = Path(name), Path(name) / "site"
        sources, kinds = packages(wanted)
        subprocess.run(
            [sys.executable, "-c", WHEEL.format(root=str(ROOT), target=str(folder))],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        subprocess.run([*PIP, "--target", str(site), *map(str, folder.glob("*.whl"))], check=True)
        venv.create(folder / "env")
        python = folder / "env/bin/python"
        where = run(
            python, site, "-c", "import pelton, pelton_plugins; print(pelton.__file__, pelton_plugins.__file__)"
        )
        if where.stdout.count(str(site)) != 2:
            raise SystemExit(f"Pelton is not the wheel's: {where.stdout}{where.stderr}")
        for kind in kinds:
            sources.append(folder / kind)
            done = run(
                python, site, "-m", "pelton", "plugins", "new", kind, f"my-{kind}", "--folder", str(folder / kind)
            )
            if done.returncode:
                raise SystemExit(f"pelton plugins new {kind}: {done.stdout}{done.stderr}")
        subprocess.run([*PIP, "--target", str(site), *map(str, sources)], check=True)
        failed = []
        for source in sources:
            project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
            package, names = project["name"], ",".join(project["entry-points"]["pelton"])
            done = run(python, site, "-m", "pelton", "plugins", "check", package, plugins=names)
            last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            print(f"{'ok  ' if done.returncode == 0 else 'FAIL'}  {package}: {last[0]}", flush=True)
            if done.returncode:
                failed.append(package)
                print("\n".join(line for line in done.stdout.splitlines() if line.startswith("FAIL")))
    print(f"{len(sources) - len(failed)} of {len(sources)} packages pass with the wheel alone")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
