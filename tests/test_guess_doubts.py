"""Logs whose guessed schema would be wrong in silence: what is asked, what is left out and why, and what is refused."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset, read_vocabulary

from jrec import cli
from jrec.data.schema import DatasetError
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Delimited, load_schema
from jrec.prepare.readers.guess import guess_schema, questions


def guess(folder, header, rows, name="log.csv"):
    """The text of a guessed schema, after it was read as one."""
    (folder / name).write_text("\n".join([header, *rows]) + "\n")
    text = guess_schema(str(folder / name))
    (folder / "guess.toml").write_text(text)
    load_schema(str(folder / "guess.toml"))
    return text


def labels(folder, common, rare):
    rows = [f"u{i % 7},i{i % 11},{common if i % 5 else rare}" for i in range(100)]
    return guess(folder, "user,item,action", rows)


@pytest.mark.parametrize(
    ("common", "rare", "positive"),
    [
        ("click", "skip", "click"),
        ("skip", "click", "click"),
        ("Purchased", "not purchased", "Purchased"),
        ("no_click", "click", "click"),
        ("like", "dislike", "like"),
        ("didn't buy", "bought", "bought"),
        ("dismissed", "conversion", "conversion"),
        ("nein", "ja", "ja"),
    ],
)
def test_words_say_which_label_is_positive(tmp_path, common, rare, positive):
    text = labels(tmp_path, common, rare)
    assert f'positive_values = ["{positive}"]' in text
    assert not [q for q in questions(text) if "positive" in q]


@pytest.mark.parametrize(("common", "rare", "positive"), [("view", "click", "click"), ("a", "b", "b"), ("9", "7", "7")])
def test_where_words_do_not_say_it_the_question_names_the_positive_value(tmp_path, common, rare, positive):
    text = labels(tmp_path, common, rare)
    other = ({common, rare} - {positive}).pop()
    assert f'positive_values = ["{positive}"]' in text
    (asked,) = [q for q in questions(text) if q.startswith('"action": ')]
    assert "is it the label?" in asked
    assert (
        f'"{positive}" is taken for 1 and "{other}" for 0; for the reverse set positive_values = ["{other}"]' in asked
    )


def test_a_column_whose_words_say_what_was_done_is_the_label(tmp_path):
    rows = [f"u{i % 7},i{i % 11},{'click' if i % 5 else 'skip'},{'ab'[i % 2]},{'xy'[i * i % 2]}" for i in range(100)]
    text = guess(tmp_path, "user,item,action,side,end", rows)
    assert '[label]\ncolumn = "action"\npositive_values = ["click"]' in text


def test_a_label_of_one_value_is_named(tmp_path):
    (asked, *_) = questions(guess(tmp_path, "user,item,clicked", [f"u{i % 7},i{i % 11},1" for i in range(100)]))
    assert asked.startswith('"label": no column looks like one.')
    assert 'Of "clicked" there is one value, but a label has two.' in asked


ROWS = [f"{i % 7},{i % 11 + 20},{i * i % 2}" for i in range(100)]


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_an_index_in_no_order_is_left_out(tmp_path, name):
    text = guess(tmp_path, f"{name},user,item,click", [f"{i * 37 % 100},{row}" for i, row in enumerate(ROWS)])
    assert f'column = "{name}"' not in text
    assert f'# "{name}" is left out: it has no name of its own, and its integers are distinct, as those of an' in text
    assert not [q for q in questions(text) if q.startswith(f'"{name}"')]


@pytest.mark.parametrize("value", ["a b|c", "{i}.5", "x{k}", "{k}"])
def test_other_columns_without_a_name_are_asked_about(tmp_path, value):
    rows = [f"{row},{value.format(i=i, k=i % 2)}" for i, row in enumerate(ROWS)]
    text = guess(tmp_path, "user,item,click,", rows)
    assert 'column = ""' not in text
    assert '# "" is left out: it has ' in text
    assert value == "a b|c" or '"": what is it? Name it in the header to make a feature of it' in questions(text)


def test_an_index_of_times_is_the_time(tmp_path):
    text = guess(tmp_path, ",user,item,click", [f"2024-05-{i % 28 + 1:02d} 10:00,{row}" for i, row in enumerate(ROWS)])
    assert '[time]\ncolumn = ""\nformat = "iso"' in text


LINES = [json.dumps({"user": i % 7, "item": f"i{i % 11}", "click": i % 2}) for i in range(100)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[17, 2, 0]\n[18, 3, 1]", "holds a JSON array a line"),
        (f"[{', '.join(LINES)}]", "holds one JSON value, .* convert it to Parquet"),
        ("[\n" + ",\n".join(LINES) + "\n]", "holds one JSON value, .* convert it to Parquet"),
        (json.dumps({"rows": 3}, indent=1), "holds one JSON value, .* convert it to Parquet"),
    ],
)
def test_json_that_is_no_object_a_line_is_refused(tmp_path, content, said):
    path = tmp_path / "log.json"
    path.write_text(content)
    (tmp_path / "clicks.toml").write_text('[label]\ncolumn = "click"\n[[categorical]]\ncolumn = "user"\n')
    for read in (guess_schema, Delimited(load_schema(str(tmp_path / "clicks.toml"))).dialect):
        with pytest.raises(DatasetError, match=rf"log\.json {said}"):
            read(str(path))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_schema_is_guessed_of_json_lines(tmp_path, mark):
    (tmp_path / "log.json").write_text(mark + "\n".join(LINES))
    guessed = guess_schema(str(tmp_path / "log.json"))
    assert [line.split('"')[1] for line in guessed.splitlines() if line.startswith("column")] == [
        "click",
        "user",
        "item",
    ]


def test_texts_of_a_table_that_are_lists_are_read_by_the_guessed_schema(tmp_path):
    tags = [json.dumps([f"t{i % 9}", f"t{i % 5}"][: i % 3]) for i in range(100)]
    columns = {"click": [i * i % 2 for i in range(100)], "user": [i % 7 for i in range(100)], "tags": tags}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    text = guess_schema(str(tmp_path / "log.parquet"))
    assert 'column = "tags"  # ' in text
    assert text.endswith("lists = true")
    (tmp_path / "guess.toml").write_text(text)
    source = Delimited(load_schema(str(tmp_path / "guess.toml")))
    prepare(source, [str(tmp_path / "log.parquet")], tmp_path / "out", PrepareOptions(min_count=1, split=(1, 0, 0)))
    dataset, read = read_dataset(tmp_path / "out")
    names, _ = read_vocabulary(tmp_path / "out", dataset.table("tags"))
    assert [[names[row] for row in one] for one in read["tags"]] == list(map(json.loads, tags))


@pytest.mark.parametrize("texts", [False, True])
def test_a_header_that_is_repeated_is_named(tmp_path, texts):
    rows = [f"u{i % 7},i{i % 11},{'yes' if i * i % 2 else 'no'}" for i in range(100)] if texts else ROWS
    with pytest.raises(DatasetError, match=r"log\.csv:52: the header is repeated, .* give the files apart, in order"):
        guess(tmp_path, "user,item,click", [*rows[:50], "user,item,click", *rows[50:]])
    schema = '[label]\ncolumn = "click"\n[[categorical]]\ncolumn = "user"\n'
    (tmp_path / "clicks.toml").write_text(schema)
    source = Delimited(load_schema(str(tmp_path / "clicks.toml")))
    with pytest.raises(
        DatasetError, match=r"log\.csv:52: field 'click' holds 'click', .*; the line repeats the header"
    ):
        prepare(source, [str(tmp_path / "log.csv")], tmp_path / "out")


def test_names_that_are_repeated_in_a_header_are_named(tmp_path):
    for header, named in (("user,user,click", "user"), ("click,x,x", "x"), ("user,,", "without a name")):
        with pytest.raises(
            DatasetError, match=rf"log\.csv:1: the header has column\(s\) {named} more than once; rename"
        ):
            guess(tmp_path, header, ROWS)


def test_repeated_lines_of_a_log_without_header_are_no_headers(tmp_path):
    text = guess(tmp_path, "red,apple,small", ["red,apple,small", "green,pear,big", "red,apple,big"] * 20)
    assert 'columns = ["c0", "c1", "c2"]' in text
    assert 'columns = ["c0", "c1", "c2"]' in guess(tmp_path, "a,a,1", ["b,c,2", "b,a,3"] * 20)


UNREADABLE = {
    "place": (pa.struct({"city": pa.string(), "zip": pa.int32()}), r"make columns of its parts \(city, zip\)"),
    "context": (pa.map_(pa.string(), pa.int64()), "make a column of each key that matters, or lists of its keys"),
    "watched": (pa.duration("ms"), "cast it to integers"),
    "pairs": (pa.list_(pa.list_(pa.int64())), "make lists of texts or numbers of it"),
    "span": (pa.month_day_nano_interval(), "cast it to texts or integers"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_columns_of_types_that_are_not_read_are_listed(tmp_path, name):
    dtype, cure = UNREADABLE[name]
    columns = {"user": [i % 7 for i in range(100)], name: pa.nulls(100, dtype), "y": [i * i % 2 for i in range(100)]}
    with pa.ipc.new_file(tmp_path / "log", pa.table(columns).schema) as file:
        file.write_table(pa.table(columns))
    text = guess_schema(str(tmp_path / "log"))
    assert re.search(rf'^# "{name}" is left out: it holds {re.escape(str(dtype)[:9])}.*; {cure}\.$', text, re.MULTILINE)


@pytest.mark.parametrize("timed", [False, True])
def test_folders_that_name_columns(tmp_path, capsys, timed):
    rows = {"user": [i % 7 for i in range(60)], "click": [i * i % 2 for i in range(60)]}
    rows |= {"ts": [1715000000 + i for i in range(60)]} if timed else {}
    for day in ("2024-05-01", "2024-05-02"):
        for site in "abc":
            folder = tmp_path / f"log/version=1/day={day}/site={site}"
            folder.mkdir(parents=True)
            pq.write_table(pa.table(rows), folder / "part-0.parquet")
    command = ["prepare", "csv", "--input", str(tmp_path / "log"), "--out", str(tmp_path / "out"), "--quiet"]
    assert cli.main(command) == 1
    asked = capsys.readouterr().err
    text = (tmp_path / "out.schema.toml").read_text()
    assert '# "version" is left out: folders name it (version=1/), and it has no other value here.' in text
    assert (
        '"site": folders name it, so that all lines of a file have the same: is it known before the label is?' in asked
    )
    assert (
        '# "day" is left out: folders name it (day=2024-05-01/), it is a time, and [time] is one column.' in text
    ) == timed
    assert ('"day": folders name it, so that all lines of a file have the same: is it the time of' in asked) != timed
    assert cli.main([*command, "--schema", str(tmp_path / "out.schema.toml"), "--min-count", "1"]) == 0
    dataset, columns = read_dataset(tmp_path / "out")
    names, _ = read_vocabulary(tmp_path / "out", dataset.table("site"))
    assert {names[row] for row in columns["site"]} == set("abc")
    assert ("day_weekday" in columns) != timed


def test_folders_of_text_files_are_mentioned(tmp_path):
    (tmp_path / "day=3").mkdir()
    text = guess(tmp_path, "user,item,click", ROWS, name="day=3/log.csv")
    assert (
        '# "day" is left out: folders name it (day=3/), which makes a column of Parquet and Arrow files only.' in text
    )


@pytest.mark.parametrize("form", ['"${:,.2f}"', "{:.0f}%", '"{:,.0f}"', "-$ {:.1f}", '"{:.2f} €"', "{:.0f} USD"])
@pytest.mark.parametrize("few", [False, True])
def test_amounts_are_asked_about(tmp_path, form, few):
    rows = [f"{row},{form.format((i % 9 if few else i) * 173.01 + 1007)}" for i, row in enumerate(ROWS)]
    text = guess(tmp_path, "user,item,click,spent", rows)
    assert 'column = "spent"' not in text
    assert '# "spent" is left out: its values are amounts with signs' in text
    assert any(
        q.startswith('"spent": texts such as "') and "write them as 1234.5, without signs" in q for q in questions(text)
    )


@pytest.mark.parametrize("value", ["{i},{k}", "101,2{k}2", "10.0.0.{k}", "2024.01.1{k}", "AB{k}", "{k}"])
def test_other_texts_of_digits_are_no_amounts(tmp_path, value):
    rows = [f'{row},"{value.format(i=i % 30 + 101, k=i % 9)}"' for i, row in enumerate(ROWS)]
    assert "amounts with signs" not in guess(tmp_path, "user,item,click,code", rows)


@pytest.mark.parametrize("name", ["time", "ts", "event_time", "timestamp", "created_at"])
@pytest.mark.parametrize(("unit", "scale"), [("seconds", 1), ("milliseconds", 1000)])
def test_times_with_fractions_are_times(tmp_path, name, unit, scale):
    at = [(1715000000.123 + 37.25 * i) * scale for i in range(100)]
    text = guess(tmp_path, f"user,item,click,{name}", [f"{row},{t!r}" for row, t in zip(ROWS, at, strict=True)])
    assert f'[time]\ncolumn = "{name}"\nformat = "{unit}"' in text
    table = {"user": [i % 7 for i in range(100)], "click": [i * i % 2 for i in range(100)], name: at}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    text = guess_schema(str(tmp_path / "log.parquet"))
    assert f'[time]\ncolumn = "{name}"\nformat = "{unit}"' in text
    (tmp_path / "guess.toml").write_text(text)
    source = Delimited(load_schema(str(tmp_path / "guess.toml")))
    prepare(source, [str(tmp_path / "log.parquet")], tmp_path / "out")


@pytest.mark.parametrize("name", ["price", "time", "time_spent"])
def test_other_fractions_are_no_times(tmp_path, name):
    text = guess(tmp_path, f"user,item,click,{name}", [f"{row},{100.5 + i}" for i, row in enumerate(ROWS)])
    assert f'[[dense]]\ncolumn = "{name}"' in text


@pytest.mark.parametrize("name", ["Year", "release_year", "yr", "YearBuilt"])
@pytest.mark.parametrize("years", [2, 30])
def test_years_are_asked_about(tmp_path, name, years):
    rows = [f"{row},{2019 - i % years * 16 // (years - 1)}" for i, row in enumerate(ROWS)]
    text = guess(tmp_path, f"user,item,click,{name}", rows)
    assert f'[[dense]]\ncolumn = "{name}"' in text
    assert f'"{name}": are its years numbers, or categories? As [[categorical]] each has a row' in "".join(
        questions(text)
    )


def test_numbers_of_years_are_no_years(tmp_path):
    text = guess(tmp_path, "user,item,click,years,year_sales", [f"{row},{i % 30},{i}.5" for i, row in enumerate(ROWS)])
    assert "are its years" not in text


@pytest.mark.parametrize(("encoding", "name"), [("latin-1", "Café"), ("cp1252", "L\u2019été")])
def test_other_encodings_are_asked_about(tmp_path, encoding, name):
    rows = [f"{row},{name if i % 3 else 'bar'}" for i, row in enumerate(ROWS)]
    (tmp_path / "log.csv").write_bytes("\n".join(["user,item,click,place", *rows, ""]).encode(encoding))
    text = guess_schema(str(tmp_path / "log.csv"))
    word = name.rpartition("\u2019")[2]
    assert f'"encoding": the file is not UTF-8; is {encoding} right, in which it has the text "{word}"?' in questions(
        text
    )
    (tmp_path / "guess.toml").write_text(text)
    assert load_schema(str(tmp_path / "guess.toml")).encoding == encoding
    (tmp_path / "log.csv").write_bytes("\n".join(["user,item,click,place", *rows, ""]).encode() + b"1,2,0,\xe9\n")
    assert "encoding =" not in guess_schema(str(tmp_path / "log.csv"))  # one line is damaged
