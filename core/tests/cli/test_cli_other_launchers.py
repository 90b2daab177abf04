"""Options of other launchers: what is said when somebody types one of them here."""

from __future__ import annotations

import pytest

from drivetrain.cli.other_launchers import advise


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--nproc_per_node", "--num_processes, which counts the processes of all machines"),
        ("--nproc-per-node", "--num_processes"),
        ("--node_rank", "--machine_rank"),
        ("--standalone", "Leave it out"),
        ("--use_cpu", "--cpu"),
        ("--multi_gpu", "--distributed_type multi_gpu"),
        ("--use_fsdp", "--distributed_type fsdp"),
        ("--tpu", "--distributed_type tpu"),
        ("--monitor_interval", "--set monitor_interval=VALUE"),
        ("--num_cpu_threads_per_process", "OMP_NUM_THREADS"),
        ("--same_network", "Leave it out: main_process_ip"),
        ("--parallelism_config_tp_size", "--set mesh.tp=VALUE"),
        ("--zero_stage", "--set deepspeed.zero_stage=VALUE"),
        ("--fsdp_sharding_strategy", "in the configuration file, under fsdp_config"),
    ],
)
def test_the_option_of_another_launcher_is_told_in_our_words(option, words):
    assert words in advise(option)


def test_what_nobody_knows_is_left_to_the_guess_after_a_typing_mistake(drivetrain):
    assert advise("--num_procesess") == ""
    done = drivetrain("launch", "--num_procesess", "2", "train.py")
    assert done.returncode == 2
    assert "'--num_processes'" in done.stderr


def test_the_command_line_says_it_and_ends_with_2(drivetrain):
    done = drivetrain("launch", "--multi_gpu", "train.py")
    assert done.returncode == 2
    assert "No such option '--multi_gpu'. Write --distributed_type multi_gpu." in done.stderr
