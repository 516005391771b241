"""Kills, stops or blocks a program at an exact moment: before or after it opens, appends to, makes or renames a file.

`at` gives the code of a program that ends so, for `cli.customized`; it runs in programs that are started and in forks.
"""

import json
from typing import Literal, NamedTuple, TypeAlias

# An audit hook is called before each operation. What the same thread does next comes after it: its next operation, once
# what it opened is written, or its next call or return, once a folder is made or a file renamed.
CODE = """
import json, os, re, signal, sys, threading, time

hosts = re.findall(r"distributed\\.process_id=(\\d+)", " ".join(sys.argv)) or ["0"]
rules = [rule for rule in json.loads({rules!r}) if str(rule["host"]) == hosts[-1]]
has_opened = set()  # threads
lock = threading.Lock()

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def kill_after(frame, event, argument):
    if frame.f_code is not watch.__code__:
        kill()

def watch(event, arguments):
    if threading.get_ident() in has_opened:
        has_opened.clear()  # a kill is an event too
        kill()
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_APPEND:
        event = "append"
    for rule in rules:
        path = arguments[rule["place"]] if event == rule["event"] else None
        if isinstance(path, (str, os.PathLike)) and re.search(rule["path"], os.path.abspath(path)):
            with lock:
                rule["nth"] -= 1
                is_moment = rule["nth"] == 0
            if is_moment and rule["action"] == "kill before":
                kill()
            if is_moment and rule["action"] == "kill after" and event in ("open", "append"):
                has_opened.add(threading.get_ident())
            elif is_moment and rule["action"] == "kill after":
                sys.setprofile(kill_after)
            if is_moment and rule["action"] == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            while is_moment and rule["action"] == "block":
                time.sleep(60)

sys.addaudithook(watch)
"""


Event: TypeAlias = Literal["open", "append", "os.mkdir", "os.rename"]  # "open" is none of those that append


class Rule(NamedTuple):
    """What happens at an operation whose path, or the target of a renaming, matches a pattern."""

    event: Event
    path: str
    action: Literal["kill before", "kill after", "block", "stop"]
    nth: int = 1  # of the operations that match
    host: int = 0  # of several: only its process


def at(*rules: Rule) -> str:
    """The code of a program that meets these rules."""
    places = {"open": 0, "append": 0, "os.mkdir": 0, "os.rename": 1}
    return CODE.format(rules=json.dumps([rule._asdict() | {"place": places[rule.event]} for rule in rules]))
