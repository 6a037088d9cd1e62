"""Fixtures shared by the tests: where the real data lie."""
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets. Not part of the project: a run without it fails here and says so."""
    folder = Path(os.environ.get("SALT_DATA_DIR", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.fail(f"no real data at {folder}: set SALT_DATA_DIR, or leave these tests out with -m 'not data'")
    return folder
