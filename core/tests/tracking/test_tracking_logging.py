from __future__ import annotations

import logging
import threading

import pytest

from drivetrain.errors import EnvironmentVariableError, UsageError
from drivetrain.logging import (
    current_rank,
    current_world_size,
    get_logger,
    set_rank,
)
from drivetrain_testing import spawn

NAME = "test_tracking_logging"


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.DEBUG, logger=NAME)
    return caplog


def messages(records):
    return [record.getMessage() for record in records.records]


def test_the_main_process_speaks_and_others_only_when_asked(records):
    logger = get_logger(NAME)
    logger.info("one %d", 1)
    set_rank(1, 2)
    logger.info("two")
    logger.info("three", main_process_only=False)
    assert messages(records) == ["one 1", "three"]


def test_the_rank_comes_from_the_environment_until_it_is_set(monkeypatch):
    assert (current_rank(), current_world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (current_rank(), current_world_size()) == (3, 4)
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(EnvironmentVariableError, match="RANK must be a whole number, not 'three'"):
        current_rank()
    set_rank(1, 2)
    assert (current_rank(), current_world_size()) == (1, 2)


def test_records_name_the_line_that_logged(records):
    logger = get_logger(NAME)
    logger.info("a")
    logger.warning_once("b")
    logger.info("c", main_process_only=False, in_order=True)
    logger.log(logging.INFO, "d")
    assert {record.filename for record in records.records} == {"test_tracking_logging.py"}
    assert {record.funcName for record in records.records} == {"test_records_name_the_line_that_logged"}


def test_a_warning_once_is_given_once_per_message_and_arguments(records):
    logger = get_logger(NAME)
    for value in (1, 1, 2):
        logger.warning_once("once %d", value)
    assert messages(records) == ["once 1", "once 2"]
    assert get_logger(NAME) is logger


def test_in_order_needs_a_barrier_and_several_speakers(records):
    logger = get_logger(NAME)
    logger.info("a", in_order=True)
    assert messages(records) == [
        "in_order=True changes nothing: only the main process logs; add main_process_only=False", "a",
    ]  # fmt: skip
    set_rank(0, 2)
    with pytest.raises(UsageError, match="Create the Accelerator"):
        logger.info("b", main_process_only=False, in_order=True)


def test_every_process_passes_the_barrier_whatever_its_level():
    passed = []
    set_rank(1, 3, barrier=lambda: passed.append(threading.get_ident()))
    logger = get_logger(NAME + ".silent")
    logger.setLevel(logging.ERROR)
    logger.info("never shown", main_process_only=False, in_order=True)
    assert len(passed) == 3


def test_levels(monkeypatch):
    assert get_logger(NAME + ".level", "info").logger.level == logging.INFO
    assert get_logger(NAME + ".level", 10).logger.level == 10
    monkeypatch.setenv("DRIVETRAIN_LOG_LEVEL", "ERROR")
    assert get_logger(NAME + ".level").logger.level == logging.ERROR
    with pytest.raises(UsageError, match="unknown log level 'loud'"):
        get_logger(NAME + ".level", "loud")


def speak(path):
    """On each rank: append to one file, in order."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    set_rank(rank, size, dist.barrier)
    logger = get_logger(NAME, "INFO")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    logger.logger.addHandler(handler)
    for turn in range(3):
        logger.info("turn %d", turn, main_process_only=False, in_order=True)
    logger.info("main only")
    handler.close()
    dist.destroy_process_group()


def test_processes_speak_one_after_the_other(tmp_path):
    spawn(speak, 3, str(tmp_path / "log"))
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [f"[rank {rank}] turn {turn}" for turn in range(3) for rank in range(3)] + ["[rank 0] main only"]
