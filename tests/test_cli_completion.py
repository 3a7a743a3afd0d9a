"""What shells are given to complete by, in a real bash where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import Pdllm

from pdllm_rag.cli.completion import SHELLS
from pdllm_rag.cli.configuration import known_options
from pdllm_rag.cli.main import build_parser


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_shown_option_is_in_the_script(shell: str, pdllm: Pdllm) -> None:
    outcome = pdllm("completion", shell)
    assert (outcome.status, outcome.err) == (0, "")
    for command, options in known_options(build_parser()).items():
        assert all(word in outcome.out for word in command)
        for option, action in options.items():
            named = option.replace("_", "-")
            assert named in outcome.out or action.help == "==SUPPRESS=="


def completed(script: Path, line: str, folder: Path) -> set[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; "
    code += "COMP_POINT=${#COMP_LINE}; _shtab_pdllm; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_choices_and_folders(pdllm: Pdllm, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(pdllm("completion", "bash").out)
    (tmp_path / "kb").mkdir()
    assert completed(script, "pdllm do", tmp_path) == {"doctor"}
    assert completed(script, "pdllm eval ne", tmp_path) == {"needle"}
    assert completed(script, "pdllm ask --min", tmp_path) == {"--min-support"}
    assert completed(script, "pdllm ask q --decoder st", tmp_path) == {"static_kv"}
    assert "kb" in {name.rstrip("/") for name in completed(script, "pdllm ask q --store k", tmp_path)}
