# SPDX-License-Identifier: Apache-2.0
"""Small models are made once, whoever wants one first."""

from kvcached.testing import models


def test_of_two_who_make_a_model_at_the_same_time_the_later_leaves_it_as_it_is(tmp_path, monkeypatch):
    folder = tmp_path / "models" / "small"
    read = []

    def make(scratch):
        if not read:
            read.append("")
            models.ensure_model("small", folder)  # another is faster, and its engine reads the model already
            read[0] = (folder / "config.json").stat()
        (scratch / "config.json").write_text("{}")

    monkeypatch.setitem(models.MAKERS, "small", make)
    assert models.ensure_model("small", folder) == folder
    assert (folder / "config.json").stat().st_ino == read[0].st_ino
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["small"]
