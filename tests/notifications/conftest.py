"""Tests that are coroutine functions run in virtual time, as those of replication do."""

from tests.replication.conftest import pytest_pyfunc_call as pytest_pyfunc_call
from tests.replication.conftest import virtual_runner as virtual_runner
