"""A log of clicks with files of users and items beside it, and the same log with their columns in it."""

import csv
import gzip
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS = """
[[dense]]
column = "age"
transform = "standardize"
missing = 30
[[categorical]]
column = "born"
quantiles = 4
[[categorical]]
column = "home"
[[categorical]]
column = "id"
name = "person"
"""
ITEMS = """
[[dense]]
column = "price"
transform = "log1p"
missing = 0
[[categorical]]
column = "tags"
separator = "|"
max_length = 3
too_long = "last"
weights = "strengths"
[[categorical]]
column = "related"
table = "item"
separator = "|"
"""
LOG = """
missing_values = ["", "NA"]
[label]
column = "click"
[time]
column = "at"
[[categorical]]
column = "user"
"""
PREJOINED = f"{LOG}{USERS.partition('[[categorical]]')[0]}{ITEMS.partition('[[categorical]]')[0]}"
PREJOINED += "".join(text[text.index("[[categorical]]") :] for text in (USERS, ITEMS))
PREJOINED = PREJOINED.replace('column = "id"', 'column = "person"')
JOINED = f"""{LOG}
[[join]]
file = "side/users.csv.gz"
key = "user"
on = "id"
name = "users"
{USERS.replace("[[", "[[join.")}
[[join]]
file = "items.parquet"
key = "item"
{ITEMS.replace("[[", "[[join.").removesuffix('separator = "|"\n')}lists = true
"""


def _user(rng) -> dict[str, str]:
    return {
        "age": rng.choice(["NA", "", *map(str, range(18, 60))]),
        "born": rng.choice(["", *map(str, range(1950, 2000))]),
        "home": rng.choice(["NA", "Rio", "a street of a rather long name 7", "a street of a rather long name 9"]),
    }


def _item(rng) -> dict[str, str]:
    count = int(rng.integers(0, 6))
    return {
        "price": rng.choice(["", f"{rng.gamma(2.0):.3f}"]),
        "tags": "|".join(rng.choice(["new", "a very long tag", "old"], count)),
        "strengths": "|".join(f"{rng.random():.3f}" for _ in range(count)),
        "related": "|".join(f"i{k}" for k in rng.integers(0, 30, int(rng.integers(0, 4)))),
    }


def write(folder: pathlib.Path, rows: int = 600, *, seed: int = 0, absent: bool = True) -> list[dict[str, str]]:
    """Writes log.csv, side/users.csv.gz, items.parquet, joined.toml, prejoined.csv and prejoined.toml.

    Returns:
      The lines of prejoined.csv. With ``absent``, some users and items of the log are in no file.
    """
    rng = np.random.default_rng(seed)
    users = {f"user number {k}" if k % 2 else f"u{k}": _user(rng) for k in range(40)}
    items = {f"i{k}": _item(rng) for k in range(25)}
    (folder / "side").mkdir(exist_ok=True)
    lines = [("extra", *next(iter(users.values())), "id")]
    lines += [("x", *user.values(), name) for name, user in users.items()]
    text = "\n".join(",".join(map(str, line)) for line in lines) + "\n"
    (folder / "side/users.csv.gz").write_bytes(gzip.compress(text.encode()))
    columns = {"item": list(items)} | {n: [one[n] for one in items.values()] for n in items["i0"]}
    columns["related"] = [text.split("|") if text else None for text in columns["related"]]
    pq.write_table(pa.table(columns), folder / "items.parquet")
    log, whole = [], []
    for _ in range(rows):
        user, item = (
            str(rng.choice([*side, *(["ghost of a user", "NA"] if absent else [])])) for side in (users, items)
        )
        line = {"click": str(rng.integers(0, 2)), "at": str(rng.integers(0, 10**6)), "user": user, "item": item}
        log.append(line)
        of_user, of_item = (
            users.get(user, dict.fromkeys(users["u0"], "")),
            items.get(item, dict.fromkeys(items["i0"], "")),
        )
        whole.append(line | of_user | {"person": user if user in users else ""} | of_item)
    for name, content in (("log.csv", log), ("prejoined.csv", whole)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(content[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(content)
    (folder / "joined.toml").write_text(JOINED)
    (folder / "prejoined.toml").write_text(PREJOINED)
    return whole
