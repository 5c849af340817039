"""What a command would destroy, as far as its words tell. (A Python is guarded by itself.)"""

import glob
import itertools
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from ddp_doctor.vault import SMALL, Refused, Vault

LIMIT = 1 << 30  # bytes of a folder that are copied before a command that may change all of it
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
BEFORE = ("sudo", "nohup", "time", "env", "exec", "command", "nice", "ionice", "timeout", "xargs")
BEFORE += ("do", "then", "else", "if", "while", "!", "{", "set", "export")
REMOVE, INTO = ("rm", "unlink", "rmdir", "mv"), ("cp", "ln", "install", "rsync", "scp", "mv")
WRITE = ("dd", "truncate", "tee", "touch", "chmod", "chown", "gzip", "gunzip", "xz", "zip", "zstd")
WRITE += ("bzip2", "shred", "sqlite3", "wget", "curl")
ANYWHERE = ("patch", "split", "csplit")
UNPACK = ("tar", "unzip", "7z", "bsdtar", "cpio")
GIT = ("checkout", "clean", "reset", "stash", "pull", "merge", "rebase", "restore", "rm")
FIND = ("-delete", "-exec", "-execdir", "-ok")
PART = re.compile(r"[;&|()\n]+")  # between two commands of a line


class Commands:
    """The commands of a line or a script. Each may change the folder or a variable."""

    def __init__(self, vault: Vault, folder: str) -> None:
        self.vault, self.folder = vault, folder
        self.variables: dict[str, str] = dict(os.environ)

    def line(self, text: str) -> None:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
        lexer.whitespace, lexer.whitespace_split = " \t", True
        try:
            tokens = [*lexer]
        except ValueError:  # quotes that do not end
            tokens = re.findall(r"[;&|()<>\n]+|[^\s;&|()<>]+", text)
        words: list[str] = []
        remaining = iter([*tokens, ";"])
        for token in remaining:
            if ">" in token and set(token) <= set("<>&|"):
                words = words[:-1] if words[-1:] in (["1"], ["2"]) else words  # of 2>file
                self.write(self.known(self.filled([next(remaining, "")]), token))
            elif PART.fullmatch(token):
                self.words(self.filled(words))
                words = []
            else:
                words.append(token)

    def filled(self, words: list[str]) -> list[str]:
        """With variables and patterns replaced, as a shell does."""
        found = []
        for word in words:
            for name, value in re.findall(r"^(\w+)=(.*)", word):
                self.variables[name] = value
            text = re.sub(r"\$\{?(\w+)\}?", lambda m: self.variables.get(m[1], m[0]), word)
            found += sorted(glob.glob(os.path.join(self.folder, text))) or [text]
        return found

    def known(self, words: list[str], act: str) -> list[str]:
        if any(re.search("[$`]", word) for word in words):
            raise Refused(f"what `{act} {' '.join(words)}` changes cannot be read from it")
        return words

    def words(self, words: list[str]) -> None:
        piped = "xargs" in words
        while words and (words[0] in BEFORE or re.match(r"\w+=|-|\d+$", words[0])):
            words = words[1:]
        if not words:
            return
        name, rest = os.path.basename(words[0]), words[1:]
        flags = [word for word in rest if word.startswith("-")]
        paths = [word for word in rest if not word.startswith("-")]
        in_place = name in ("sed", "perl") and any(flag.startswith("-i") for flag in flags)
        if name in (*REMOVE, *INTO, *WRITE) or in_place:
            self.known(rest, name)
            if piped:
                raise Refused(f"`xargs {name}` does not say what it changes")
        if name in SHELLS and any(re.match("-[a-z]*c", flag) for flag in flags):
            self.line(paths[0] if paths else "")
        elif name in SHELLS or name in ("source", "."):
            self.script(paths[:1])
        elif name == "cd":
            self.folder = self.full(paths[0] if paths else os.path.expanduser("~"))
        elif name in REMOVE or name in INTO:
            self.moved(name, flags, rest, paths)
        elif name == "dd":
            self.write([word[3:] for word in rest if word.startswith("of=")])
        elif name in WRITE or in_place:
            self.write([end for path in operands(rest) for end in made_of(path)])
        elif name in ANYWHERE:
            self.write([self.folder])
        elif name in UNPACK:
            self.unpack(name, rest)
        elif name == "git" and any(word in GIT for word in rest):
            self.write([self.folder])
        elif name == "find" and any(word in FIND for word in rest):
            self.write(paths[:1])
        elif not guards_itself(self.full(words[0])) or re.match(
            "-[a-zA-Z]*[IES]", rest[0] if rest else ""
        ):
            self.write([p for p in operands(rest) if self.is_small(p)])
            self.script([words[0]] if os.sep in words[0] else [])

    def script(self, paths: list[str]) -> None:
        for path in map(Path, map(self.full, paths)):
            if path.is_file() and path.stat().st_size < 1 << 20:
                text = path.read_bytes()
                if b"\0" not in text and not re.match(rb"#!.*python", text):
                    self.line(text.decode(errors="replace"))

    def moved(self, name: str, flags: list[str], rest: list[str], paths: list[str]) -> None:
        into = paths[-1] if name in INTO and len(paths) > 1 else None
        for one, two in zip(rest, [*rest[1:], ""], strict=True):
            into = two if one in ("-t", "--target-directory") else into
            into = one.partition("=")[2] if one.startswith("--target-directory=") else into
        sources = [path for path in paths if path != into]
        for source in sources if name in REMOVE else ():
            self.vault.before_tree(self.full(source), "remove")
        for source in sources if into and ":" not in into else ():
            to = self.full(into)
            if os.path.isdir(to) and not (name == "rsync" and source.endswith("/")):
                to = os.path.join(to, os.path.basename(source.rstrip("/")))
            if name == "mv":
                self.vault.before_tree(to, "remove")
                self.vault.before_rename(self.full(source), to)
            else:
                self.write([to])
        if any(flag.startswith(("--delete", "--remove-source")) for flag in flags):
            self.write(sources)
            self.write([into] if into else [])

    def unpack(self, name: str, rest: list[str]) -> None:
        first = rest[0] if rest else ""
        lists = ("t" if name != "unzip" else "l") in first.partition(".")[0]
        makes = name != "unzip" and "c" in first
        self.write([path for path in operands(rest) if makes and os.path.isfile(self.full(path))])
        if rest and not lists and not makes:
            to = [b for a, b in itertools.pairwise(rest) if a in ("-C", "-d")]
            self.write(to or [self.folder])

    def is_small(self, path: str) -> bool:
        path = self.full(path)
        return os.path.isfile(path) and os.path.getsize(path) <= SMALL

    def full(self, path: str) -> str:
        parent, base = os.path.split(os.path.abspath(os.path.join(self.folder, path)))
        return os.path.join(os.path.realpath(parent), base)

    def write(self, paths: list[str]) -> None:
        """They may be changed: files, or anything in folders."""
        for path in map(self.full, paths):
            if os.path.isdir(path):
                size = 0
                for parent, _, names in os.walk(path):
                    size += sum(os.lstat(os.path.join(parent, name)).st_size for name in names)
                    if size > LIMIT:
                        raise Refused(f"a command may change all of {path}, too large to copy")
            self.vault.before_tree(path, "write")


def guards_itself(program: str) -> bool:
    """Whether it is a Python, or one of its scripts, such as accelerate."""
    found = program if os.path.isfile(program) else shutil.which(os.path.basename(program))
    if not found or os.path.basename(found).startswith("python"):
        return True
    with open(found, "rb") as file:
        return bool(re.match(rb"#!.*python|#!/bin/sh\n.{0,3}exec", file.read(200)))


def operands(words: list[str]) -> Iterator[str]:
    """All that may be files, also in `of=x`, `-ox` and `--output=x`."""
    for word in words:
        yield word
        if "=" in word:
            yield word.partition("=")[2]
        if word.startswith("-") and not word.startswith("--"):
            yield word[2:]


def made_of(path: str) -> Iterator[str]:
    """What a command may make of a file: it packs or unpacks it, or loads it from somewhere."""
    yield from (path, os.path.basename(path), os.path.splitext(path)[0])
    yield from (path + end for end in (".gz", ".xz", ".bz2", ".zst", ".zip", ".bak", ".orig"))


def before(vault: Vault, words: object, folder: str) -> None:
    """Put away what a command may change, or raise Refused."""
    commands = Commands(vault, folder)
    if isinstance(words, (str, bytes, os.PathLike)):
        line = os.fsdecode(os.fspath(words))
        commands.words([line]) if os.path.exists(commands.full(line)) else commands.line(line)
    else:
        commands.words([os.fsdecode(os.fspath(word)) for word in words])  # type: ignore[attr-defined]
