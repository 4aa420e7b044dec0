import logging

from evalpool.worker.logs import Text


def test_output_of_a_program_in_the_log_is_escaped_and_indented() -> None:
    said = "ended\x1b[2J\x9b\u202e\n12:00:00 INFO evalpool.runner: forged"
    record = logging.LogRecord("evalpool.runner", logging.INFO, "", 0, "%s", (said,), None)
    record.action = "job_finished"
    first, second = Text().format(record).split("\n")
    assert first.endswith("INFO evalpool.runner: ended\\u001b[2J\\u009b\\u202e")
    assert second == "  12:00:00 INFO evalpool.runner: forged (action=job_finished)"
