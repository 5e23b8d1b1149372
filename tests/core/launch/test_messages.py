"""ztk's log messages: a rank of a run prints them to standard error; in a library, the user's logging decides."""

import subprocess
import sys

SAY = "import logging; log = logging.getLogger('ztk.core.runtime'); log.info('so far'); log.warning('rank 1 is late')"


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_a_rank_shows_messages_and_a_library_user_warnings():
    assert said(f"from ztk.worker import show_messages; show_messages(); {SAY}") == "ztk: so far\nztk: rank 1 is late\n"
    assert said(f"import ztk; {SAY}") == "rank 1 is late\n"


def test_a_program_that_sets_up_logging_keeps_its_own():
    own = "import logging; logging.basicConfig(format='mine: %(message)s', level=logging.WARNING)"
    told = said(f"{own}; from ztk.worker import show_messages; show_messages(); {SAY}")
    assert told == "mine: rank 1 is late\n"
