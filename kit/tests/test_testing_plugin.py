"""The hygiene plugin fails what leaks, lets pass what cleans up, and explains why a test for a GPU is skipped."""

from __future__ import annotations

import threading

import pytest

# Imported here since pytester forgets what its inner runs import, and torch cannot be imported twice in a process.
import torch._dynamo
import torch.distributed  # noqa: F401

pytest_plugins = ["pytester"]

LEAKS = {
    "environment variable LEAKED": "import os; os.environ['LEAKED'] = '1'",
    "environment variable HOME": "import os; del os.environ['HOME']",
    "default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "default device": "import torch; torch.set_default_device('meta')",
    "handler of SIGTERM": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "number of threads": "import torch; torch.set_num_threads(torch.get_num_threads() + 1)",
    "deterministic algorithms": "import torch; torch.use_deterministic_algorithms(True)",
    "gradients enabled": "import torch; torch.set_grad_enabled(False)",
    "default process group": (
        "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"
    ),
    "thread left behind": "import threading, time; threading.Thread(target=time.sleep, args=(1,)).start()",
    "current folder": "import os; os.chdir('/')",
}


def run(pytester: pytest.Pytester, body: str, *, mark: str = "") -> pytest.RunResult:
    lines = "\n".join(f"    {line}" for line in body.split("\n"))
    pytester.makepyfile(
        f"import pytest\nimport torch\nimport torch.distributed\n{mark}\ndef test_it(monkeypatch):\n{lines}\n"
        "def test_after():\n    pass\n"
    )
    return pytester.runpytest_inprocess("-p", "drivetrain_testing.plugin", "--strict-markers", "-rs")


@pytest.mark.parametrize("told", LEAKS)
def test_leak_is_told_once(pytester: pytest.Pytester, told: str) -> None:
    result = run(pytester, LEAKS[told])
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*the test left behind: *{told}*"])
    for thread in threading.enumerate():
        # The inner run shares this process: its stray thread is the outer check's too until it ends.
        if "sleep" in thread.name:
            thread.join()


def test_other_peoples_tests_pay_nothing_for_the_kits_options(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n"
        "def test_it(request):\n"
        "    assert request.config.pluginmanager.has_plugin('drivetrain')\n"
        "    assert not {'torch', 'numpy', 'pydantic', 'drivetrain_testing.outcomes'} & set(sys.modules)\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*conformance*")


def test_what_a_test_takes_back_is_no_leak(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        "monkeypatch.setenv('TAKEN_BACK', '1')\n"
        "torch.set_default_dtype(torch.float64)\n"
        "torch.set_default_dtype(torch.float32)",
    )
    result.assert_outcomes(passed=2)


def test_gpu_test_skips_with_its_reason_where_there_are_too_few(pytester: pytest.Pytester) -> None:
    result = run(pytester, "assert False", mark="@pytest.mark.gpu(1000)")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*needs 1000 accelerator(s), torch * finds *"])
