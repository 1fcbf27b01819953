"""Titles of items: MovieLens' three kinds of files, and what is refused, with the line."""

import pytest

from hotloop.data.titles import read_titles
from hotloop.errors import DataError

U_ITEM = "1|Toy Story (1995)|01-Jan-1995||http://us.imdb.com/M/title-exact?Toy%20Story%20(1995)|0|0|1\n"
U_ITEM += "267|unknown||||1|0|0\n1654|Misérables, Les (1995)|01-Jan-1995||x|0|0|0\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (U_ITEM.encode("latin-1"), {1: "Toy Story (1995)", 267: "unknown", 1654: "Misérables, Les (1995)"}),
        (
            b'movieId,title,genres\r\n1,Toy Story (1995),Adventure\r\n11,"American President, The (1995)",Drama\r\n'
            b'171,"""Great Performances"" Cats (1998)",Musical\r\n',
            {
                1: "Toy Story (1995)",
                11: "American President, The (1995)",
                171: '"Great Performances" Cats (1998)',
            },
        ),
        (
            "1::Toy Story: II (1999)::Comedy\n\n2::Amélie (2001)::Romance\n".encode(),
            {1: "Toy Story: II (1999)", 2: "Amélie (2001)"},
        ),
        (b"\xef\xbb\xbfitem_id\ttitle\n5\ta  b\n", {5: "a b"}),
        (b"7,A\n8,B", {7: "A", 8: "B"}),
        (b'1,"Postino, Il",Drama|Romance\n2,Up::Down,Comedy\n', {1: "Postino, Il", 2: "Up::Down"}),
        (b"1|Face::Off, The (1997)|x\n2|B\n", {1: "Face::Off, The (1997)", 2: "B"}),
    ],
)
def test_files_of_movielens_are_understood(content, expected, tmp_path):
    path = tmp_path / "titles"
    path.write_bytes(content)
    assert read_titles(path) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no title in this file"),
        (b"movieId,title,genres\n", "no title in this file"),
        (b"just words\n", r"line 1: no '\|', '::', TAB or comma"),
        (b"1|A\n2|\n", "line 2: id 2 has no title"),
        (b"1|A\nB|2\n", "line 2: id 'B' is not a whole number"),
        (b"1|A\n1|B\n", "line 2: id 1 stands here again"),
        (b"1|A\n2\n", "line 2: 1 field"),
        (b'1,A\n2,"B\n', "line 3: unexpected end of data"),
        (b"12345678901234567890|A\n", "line 1: id '12345678901234567890' is too large"),
        (b"1\t3\t5\t881250949\n\0", "not a text file"),
        (b"name|year\n1|A\n", "line 1: id 'name' is not a whole number"),
    ],
)
def test_other_files_are_refused_in_one_line(content, reason, tmp_path):
    path = tmp_path / "titles"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as found:
        read_titles(path)
    assert str(found.value).startswith(str(path)) and "\n" not in str(found.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_titles(tmp_path / "none")
