import pytest
from fixtures_quality import write_data


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """A small evaluation set of every kind."""
    return write_data(tmp_path_factory.mktemp("data"))
