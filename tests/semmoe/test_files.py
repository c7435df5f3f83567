"""A written file is whole or absent, whatever stops the writing."""

from __future__ import annotations

import pytest

from semmoe.errors import UserError
from semmoe.files import replacing, write_atomically


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device"), ValueError, SystemExit])
def test_what_stops_the_writing_leaves_the_old_content_and_nothing_else(tmp_path, stop):
    path = tmp_path / "row.json"
    write_atomically(path, "old")
    expected = UserError if isinstance(stop, OSError) else stop
    with pytest.raises(expected), replacing(path) as file:
        file.write(b"half of")
        raise stop
    assert [f.name for f in tmp_path.iterdir()] == ["row.json"] and path.read_text() == "old"


def test_refusals_of_the_system_name_the_file_and_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/row\.json: cannot be written \((File exists|Not a directory)"):
        write_atomically(tmp_path / "file" / "row.json", "x")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match=r"folder\.json: cannot be written \(Is a directory"):
        write_atomically(tmp_path / "folder.json", "x")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "folder.json"]
