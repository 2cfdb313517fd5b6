"""Nothing here listens on a port, unpickles, starts a process or runs what it reads, but for the few places that are named."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepledger

#: Modules of which none is imported: they unpickle, run text as code, start processes, open connections or ports, or unpack archives.
MODULES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "copyreg", "pickletools"),
    *("importlib", "imp", "runpy", "pkgutil", "code", "codeop", "builtins", "ctypes", "cffi", "zipimport", "pydoc"),
    *("subprocess", "multiprocessing", "pty", "concurrent", "sched", "asyncore"),
    *("socket", "socketserver", "ssl", "select", "selectors", "asyncio", "http", "xmlrpc", "wsgiref", "ftplib", "smtplib", "telnetlib"),
    *("flask", "aiohttp", "tornado", "uvicorn", "fastapi", "grpc", "zmq", "requests", "httpx", "urllib3", "webbrowser"),
    *("yaml", "jinja2", "mako", "xml", "lxml", "tarfile", "plistlib"),
    "urllib.request",
}
#: Names of which none is used: built in, or imported from anywhere.
NAMES = {"eval", "exec", "compile", "__import__", "execfile", "import_module", "mktemp"}
#: What of a module is not used, by the module's own name or another.
ATTRIBUTES = {
    "os": ("system", "popen", "exec*", "spawn*", "posix_spawn*", "fork", "forkpty", "startfile"),
    "sys": ("settrace", "setprofile", "addaudithook"),
    "shutil": ("unpack_archive",),
    "tempfile": ("mktemp",),
    "torch": ("load", "jit", "hub"),
    "pandas": ("read_pickle", "eval"),
    "types": ("FunctionType", "CodeType"),
}
#: Methods of which none is called, of whatever object: they unpack an archive to the names that it gives, or take text for a template.
METHODS = {"extractall", "extract", "from_string", "listen", "serve_forever", "bind", "fromfile", "read_pickle", "unsafe_load", "full_load"}
#: Readers of arrays -> each is called with ``allow_pickle=False``.
READERS = {"load", "read_array", "open_memmap"}

#: Where it is done all the same -> why that lets nobody in.
ALLOWED = {
    ("stepledger.jobs", "concurrent"): "the processes of --jobs, which this one starts and nobody else talks to",
    ("stepledger.jobs", "multiprocessing"): "likewise: has them spawned, whatever the system's default is",
    ("stepledger.recording", "multiprocessing"): "asks whether this is a worker, and has its ledgers closed at its end; none is started",
    ("stepledger.sb3.callers", "types.CodeType"): "a type in an annotation; no code is made",
    ("stepledger.recorder", "importlib"): "importlib.metadata says which versions are installed",
    ("stepledger.remote", "urllib.request"): "its url2pathname() turns a file:// URI into a path; nothing is requested",
    ("stepledger.report", "importlib"): "imports the module of a format, which is one of a fixed table",
    ("stepledger.report", "import_module"): "likewise",
    ("stepledger.report.html", "jinja2"): "templates are those of the package, everything in them is escaped, undefined names are errors",
    ("stepledger.report.junit", "xml"): "writes XML, and parses none",
    ("stepledger_ray.taps", "ctypes"): "sets a local variable of a frame in the same process; no library is loaded",
}


def sources() -> Iterator[tuple[str, str]]:
    """Each module of both packages: its name and its text."""
    for package in ("stepledger", "stepledger_ray"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path.read_text()


def done(text: str) -> set[str]:
    """What a module does that lets somebody in, by the names above."""
    found: set[str] = set()
    called: dict[str, str] = {}  # name in this module -> module
    tree = ast.parse(text)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                called[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
                found |= _imported(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= _imported(node.module or "")
            for alias in node.names:
                found |= _imported(f"{node.module}.{alias.name}") | _attribute(node.module or "", alias.name)
                found |= {alias.name} & NAMES
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found |= {node.id} & NAMES
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & (NAMES - {"eval", "compile", "exec"})  # re.compile(), a model's eval()
            if isinstance(node.value, ast.Name):
                found |= _attribute(called.get(node.value.id, ""), node.attr)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            if isinstance(node.func, ast.Attribute):
                found |= {name} & METHODS
            if name in READERS and not _is_json(node, called) and not (isinstance(node.func, ast.Name) and name in own):
                allowed = [keyword.value for keyword in node.keywords if keyword.arg == "allow_pickle"]
                if not (allowed and isinstance(allowed[0], ast.Constant) and allowed[0].value is False):
                    found.add(name)
    return found


def _imported(module: str) -> set[str]:
    return {module.partition(".")[0], module} & MODULES


def _attribute(module: str, name: str) -> set[str]:
    for pattern in ATTRIBUTES.get(module, ()):
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return {f"{module}.{name}"}
    return set()


def _is_json(call: ast.Call, called: dict[str, str]) -> bool:
    """``json.load()`` makes nothing but numbers, texts, lists and dicts."""
    return isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and called.get(call.func.value.id) == "json"


def test_nothing_lets_anybody_in_but_what_is_named() -> None:
    found = {(name, what) for name, text in sources() for what in done(text)}
    assert found - ALLOWED.keys() == set(), "use something else, or name it here with the reason why it lets nobody in"
    assert ALLOWED.keys() - found == set(), "no longer done there: take it out"


def test_templates_are_the_packages_own_and_escaped() -> None:
    text = dict(sources())["stepledger.report.html"]
    (made,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Environment"
    ]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in made.keywords}
    assert given["autoescape"] == "True"
    assert given["undefined"] == "StrictUndefined"
    assert "PackageLoader('stepledger.report', 'templates')" in text.replace('"', "'")
    assert given["loader"] == "templates"
    templates = Path(stepledger.__file__).parent / "report" / "templates"
    for path in templates.iterdir():
        assert "autoescape false" not in path.read_text()


def test_every_module_is_walked() -> None:
    names = {name for name, _ in sources()}
    assert {"stepledger", "stepledger.archive", "stepledger.report.html", "stepledger.sb3.hooks", "stepledger_ray.gather"} <= names
    assert len(names) > 80


WAYS_IN = {
    "import pickle": "pickle",
    "import cloudpickle as cp": "cloudpickle",
    "from marshal import loads": "marshal",
    "def f():\n    import shelve": "shelve",
    "eval('1')": "eval",
    "run = exec": "exec",
    "compile('1', '', 'eval')": "compile",
    "__import__('os')": "__import__",
    "from importlib import import_module as load_it": "import_module",
    "import importlib.util": "importlib",
    "import subprocess": "subprocess",
    "import os\nos.system('ls')": "os.system",
    "import os as o\no.execvp('ls', [])": "os.execvp",
    "from os import popen": "os.popen",
    "from os import spawnl as s": "os.spawnl",
    "import multiprocessing.connection": "multiprocessing",
    "import socket": "socket",
    "from http.server import HTTPServer": "http",
    "import urllib.request": "urllib.request",
    "from urllib import request": "urllib.request",
    "server.serve_forever()": "serve_forever",
    "import ctypes": "ctypes",
    "import numpy as np\nnp.load('a')": "load",
    "import numpy as np\nnp.load('a', allow_pickle=True)": "load",
    "import numpy as np\nnp.load('a', allow_pickle=trusted)": "load",
    "from numpy import load\nload('a')": "load",
    "from numpy.lib import format\nformat.read_array(f)": "read_array",
    "import torch\ntorch.load('a')": "torch.load",
    "import yaml": "yaml",
    "environment.from_string(text)": "from_string",
    "from xml.etree import ElementTree": "xml",
    "import tempfile\ntempfile.mktemp()": "tempfile.mktemp",
    "from tempfile import mktemp": "mktemp",
    "archive.extractall('.')": "extractall",
    "import shutil\nshutil.unpack_archive('a')": "shutil.unpack_archive",
    "import builtins\nbuiltins.eval('1')": "builtins",
}


@pytest.mark.parametrize("text", WAYS_IN)
def test_each_way_in_is_seen(text: str) -> None:
    assert WAYS_IN[text] in done(text)


@pytest.mark.parametrize(
    "text", ["import re\nre.compile('a')", "model.eval()", "import json\njson.load(f)", "np.load(f, allow_pickle=False)"]
)
def test_what_lets_nobody_in_is_not_taken_for_a_way_in(text: str) -> None:
    assert done(text) == set()
