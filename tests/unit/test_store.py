"""Files of our own: written whole or not at all, for their owner alone where they hold texts, checked when read."""

import os
import shutil

import numpy as np
import pytest

from sameseed import store
from sameseed.drafters._history import TextStore


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, umask):
    path = tmp_path / "file"
    for mode, seen in ((0o666, 0o644), (store.PRIVATE, 0o600)):
        with store.replacing(path, mode) as file:
            file.write(b"whole")
        assert path.read_bytes() == b"whole" and path.stat().st_mode & 0o777 == seen
    with pytest.raises(ZeroDivisionError), store.replacing(path) as file:
        file.write(b"half")
        1 / 0  # noqa: B018
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]


def test_others_may_not_read_texts(tmp_path, umask, monkeypatch):
    """The suffix drafter's store, also one that an earlier version left open to all, and the cache of texts."""
    texts = TextStore(tmp_path / "texts", 100, 50)
    texts.append([1, 2, 3])
    texts.path.chmod(0o644)
    assert TextStore(texts.path, 100, 50).read() == [[1, 2, 3]]
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    store.write("texts", "key", {"tokens": np.arange(3)})
    for path in (texts.path, *(tmp_path / "cache").rglob("*"), tmp_path / "cache"):
        assert not path.stat().st_mode & 0o077, path


def test_a_damaged_file_is_no_file(tmp_path, monkeypatch, caplog):
    """Wherever a byte is flipped, and however short the file is."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    store.write("kind", "key", {"a": np.arange(300)})
    file, arrays = tmp_path / "kind" / "key.npz", store.read("kind", "key")
    assert arrays is not None and arrays["a"].tolist() == [*range(300)]
    whole = file.read_bytes()
    at = whole.index(b"a.npy") + 40  # within the array's own bytes
    for content in (b"", b"PK\x03\x04", whole[:-30], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
        file.write_bytes(content)
        assert store.read("kind", "key") is None
    assert len(caplog.messages) == 4


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "file"))
    store.write("kind", "key", {"a": np.arange(3)})
    assert store.VARIABLE in caplog.text and store.read("kind", "key") is None


def test_a_user_without_a_home_folder_goes_on(monkeypatch, caplog):
    for name in ("HOME", "XDG_CACHE_HOME", store.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    assert store.read("kind", "key") is None
    store.write("kind", "key", {"a": np.arange(3)})
    assert store.VARIABLE in caplog.text


def test_a_digest_of_weights_is_that_of_a_copy(tmp_path, pair_folders):
    keys = [store.weights_key(folder) for folder in pair_folders]
    assert keys[0] != keys[1]
    shutil.copytree(pair_folders[0], tmp_path / "copy")
    assert store.weights_key(tmp_path / "copy") == keys[0]
