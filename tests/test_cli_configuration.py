"""Options from the environment and from a configuration file, and where they stand to those that are typed."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import pytest
from command_line import Pdllm

from pdllm_rag.cli import configuration, serve
from pdllm_rag.cli.configuration import parse_args
from pdllm_rag.cli.main import build_parser
from pdllm_rag.server import ServerSettings

IN_BOTH = {"host", "port", "api_key_file", "without_key", "max_batch"}  # options of `serve` by the settings' own names
OTHERWISE = {"allowed_hosts": "allow_host", "cors_origins": "cors_origin", "api_key": None}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and no configuration but what the test writes."""
    for name in [name for name in os.environ if name.startswith("PDLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def parsed(line: str) -> Namespace:
    return parse_args(build_parser(), line.split())


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        parsed(line)
    assert leaving.value.code == 2
    return capsys.readouterr().err


def test_the_command_line_goes_before_the_environment_the_file_and_the_default(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "ask q --store kb"
    assert parsed(line).k == 4
    file = write(here / "pdllm.toml", "[default]\nk = 5\n")
    assert parsed(line).k == 5
    file.write_text("[default]\nk = 5\n[ask]\nk = 6\n")
    assert parsed(line).k == 6
    assert parsed("eval qa --data f --store kb").k == 5
    monkeypatch.setenv("PDLLM_K", "7")
    assert parsed(line).k == 7
    monkeypatch.setenv("PDLLM_ASK_K", "8")
    args = parsed(line)
    assert (args.k, args.configured) == (8, {"k": "PDLLM_ASK_K"})
    args = parsed(f"{line} --k 4")  # its default, but typed
    assert (args.k, args.configured) == (4, {})


def test_a_command_in_a_command_has_a_table_and_variables_of_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "pdllm.toml", "[eval]\nk = 2\n[eval.qa]\nk = 3\n[train.chunk-lora]\nrank = 8\n")
    assert parsed("eval qa --data f").k == 3
    assert parsed("eval needle").k == 2
    assert parsed("ask q --store kb").k == 4
    assert parsed("train chunk-lora --model m --data d --out o --steps 1").rank == 8
    monkeypatch.setenv("PDLLM_EVAL_QA_K", "9")
    assert (parsed("eval qa --data f").k, parsed("eval needle").k) == (9, 2)


def test_every_option_without_a_value_keeps_its_default() -> None:
    for line in ("ask q --store s", "serve --store s", "eval reuse", "bench decode", "store limit --store s 1GB"):
        plain, filled = build_parser().parse_args(line.split()), parsed(line)
        assert {name: value for name, value in vars(filled).items() if name in vars(plain)}.keys() == vars(plain).keys()
        for name, value in vars(plain).items():
            if not callable(value):
                assert getattr(filled, name) == value, name


def test_a_required_option_may_be_given_by_file_or_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--store" in refusal("ask q", capsys)
    monkeypatch.setenv("PDLLM_STORE", "from-env")
    assert parsed("ask q").store == "from-env"
    monkeypatch.delenv("PDLLM_STORE")
    write(here / "pdllm.toml", '[default]\nstore = "kb"\n')
    assert parsed("ask q").store == str(here / "kb")


def test_values_have_the_forms_that_toml_and_variables_allow(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    [ask]
    no-abstain = true
    stop = ["a,b", "c"]
    cache_bytes = "20GB"
    filter = { year = 2025, kind = "x" }
    decoder-option = { block = 4, exact = true }
    temperature = 1e-1
    [eval.needle]
    lengths = ["1k", "2k"]
    [eval.retrieval]
    documents = ["a", "/b"]
    """
    write(here / "pdllm.toml", text)
    args = parsed("ask q --store s")
    assert (args.no_abstain, args.stop, args.cache_bytes) == (True, ["a,b", "c"], 20 * 10**9)
    assert (args.filter, args.decoder_option) == ({"year": "2025", "kind": "x"}, {"block": 4, "exact": True})
    assert args.temperature == 0.1
    assert parsed("eval needle").lengths == parsed("eval needle --lengths 1k,2k").lengths
    assert parsed("eval retrieval --data f").documents == [str(here / "a"), "/b"]
    for name, value in {"STOP": "x, y", "FILTER": "a=1,b=2", "JSON": "yes", "ASK_NO_ABSTAIN": "0"}.items():
        monkeypatch.setenv(f"PDLLM_{name}", value)
    args = parsed("ask q --store s")
    assert (args.stop, args.filter, args.json, args.no_abstain) == (["x", "y"], {"a": "1", "b": "2"}, True, False)
    args = parsed("ask q --store s --stop z --filter c=3")  # typed ones stand in their place, and not beside them
    assert (args.stop, args.filter) == (["z"], {"c": "3"})


def test_paths_in_a_file_start_from_its_folder_and_names_stay(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[default]\nstore = "kb"\nmodel = "demo"\ncanvas-adapter = "demo-d2f"\ncache = "~/c"\n'
    write(here / "pdllm.toml", text)
    (here / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(here / "deep" / "er")
    args = parsed("ask q")
    assert (args.store, args.model, args.canvas_adapter) == (str(here / "kb"), "demo", "demo-d2f")
    assert args.cache == os.path.expanduser("~/c")
    write(here / "pdllm.toml", '[default]\nstore = "s3://bucket/kb"\n')
    assert parsed("ask q").store == "s3://bucket/kb"


def test_the_nearest_file_counts_and_others_are_not_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = write(here.parent / "user" / "pdllm" / "config.toml", "[ask]\nk = 1\n")
    assert parsed("ask q --store s").configured == {"k": f"{users}: [ask] k"}
    write(here.parent / "pdllm.toml", "[ask]\nk = 2\n")
    assert parsed("ask q --store s").k == 2
    write(here / "pdllm.toml", "[default]\n")
    assert parsed("ask q --store s").k == 4
    monkeypatch.setenv("PDLLM_CONFIG", str(users))
    assert parsed("ask q --store s").k == 1
    monkeypatch.setenv("PDLLM_CONFIG", "")
    assert parsed("ask q --store s").k == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[default]\nstor = 1", "[default] stor is no option; did you mean store?"),
        ("[ask]\nmin_suport = 1", "[ask] min_suport is no option there; did you mean min-support?"),
        ("[ask]\nchunk-len = 1", "[ask] chunk-len is no option there"),
        ("[asks]\nk = 1", "asks is no option; did you mean ask?"),
        ("[eval.neddle]\nk = 1", "[eval] neddle is no option there; did you mean needle?"),
        ("k = 1", "k is no option, expected [default] or a command's table"),
        ("[ask]\nmax-new-tokens = 1\nmax_new_tokens = 1", "is given twice, with - and with _"),
        ("[ask]\nquestion = 'x'", "[ask] question is no option there"),
        ("[ask]\nk = 0", "[ask] k: got '0', expected a whole number of 1 or more"),
        ("[ask]\ndecoder = 'magic'", "[ask] decoder: invalid choice: 'magic'"),
        ("[ask]\njson = 2", "[ask] json: got 2, expected true or false"),
        ("[ask]\ntrace = true", "[ask] trace: got True, expected text or a number"),
        ("[ask]\nno-abstain = true\nmin-support = 0.1", "not allowed with"),
        ("[ask", "is no TOML"),
        ("default = 3", "[default] is no table"),
    ],
)
def test_a_wrong_file_is_named_with_the_key_and_what_was_expected(
    text: str, expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(here / "pdllm.toml", text)
    said = refusal("ask q --store s", capsys)
    assert expected in said
    assert str(file) in said


def test_a_wrong_variable_or_a_file_that_is_not_there_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDLLM_THRESHOLD", "2")
    assert "PDLLM_THRESHOLD: got '2', expected a number from 0 to 1" in refusal("ask q --store s", capsys)
    monkeypatch.setenv("PDLLM_CONFIG", str(here / "none.toml"))
    assert "none.toml" in refusal("ask q --store s", capsys)


def test_a_file_on_the_way_up_that_another_user_wrote_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(here.parent / "pdllm.toml", "[ask]\nk = 2\n")
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    if file.stat().st_uid == 0:
        os.chown(file, 12345, -1)
    assert f"set PDLLM_CONFIG={file}" in refusal("ask q --store s", capsys)
    monkeypatch.setenv("PDLLM_CONFIG", str(file))
    assert parsed("ask q --store s").k == 2


def test_of_options_that_exclude_each_other_the_one_that_counts_first_is_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "pdllm.toml", "[ask]\nmin-support = 0.4\n[bench]\nmodel = 'm'\n")
    args = parsed("ask q --store s --no-abstain")
    assert (args.no_abstain, args.min_support) == (True, None)
    monkeypatch.setenv("PDLLM_NO_ABSTAIN", "true")
    args = parsed("ask q --store s")
    assert (args.no_abstain, args.min_support) == (True, None)
    args = parsed("ask q --store s --min-support 0.7")
    assert (args.no_abstain, args.min_support) == (False, 0.7)
    args = parsed("bench prefill --shape dream-7b")
    assert (args.shape, args.model) == ("dream-7b", "demo")


def test_no_variable_has_two_meanings() -> None:
    known = configuration.known_options(build_parser())
    names = [
        "_".join((*command, option)).upper().replace("-", "_")
        for command, options in known.items()
        for option in options
    ]
    assert len(names) == len(set(names))
    assert "CONFIG" not in names


def test_the_servers_own_variables_mean_what_the_options_mean() -> None:
    fields = set(ServerSettings.model_fields)
    assert fields == IN_BOTH | OTHERWISE.keys() | set(serve.LIMITS)
    known = configuration.known_options(build_parser())
    own = fields - OTHERWISE.keys() | {option for option in OTHERWISE.values() if option}
    assert own <= known[("serve",)].keys()
    for command, options in known.items():  # else a limit would be another command's option, too
        assert command in ((), ("serve",)) or not own & options.keys()


def test_limits_of_the_server_reach_it_from_the_file(here: Path, monkeypatch: pytest.MonkeyPatch, pdllm: Pdllm) -> None:
    write(here / "pdllm.toml", "[serve]\nrequest-seconds = 7.5\nmax-jobs = 3\nallow-host = ['a', 'b']\nmax-k = 5\n")
    monkeypatch.setenv("PDLLM_MAX_K", "6")
    seen: list[ServerSettings] = []
    monkeypatch.setattr(ServerSettings, "check_bind", lambda settings: seen.append(settings))
    monkeypatch.setattr(serve, "_bound", lambda *_: (_ for _ in ()).throw(OSError("enough")))
    assert pdllm("serve", "--store", "kb").status == 1
    (settings,) = seen
    assert (settings.request_seconds, settings.max_jobs, settings.max_k) == (7.5, 3, 6)
    assert settings.allowed_hosts == ("a", "b")


def test_a_store_for_all_commands_is_not_for_those_that_do_something_else_with_one(here: Path) -> None:
    file = write(here / "pdllm.toml", "[default]\nstore = 'kb'\ncache = 'c'\n[eval]\nstore = 'kb'\n")
    lines = ("eval longbench --data f", "eval infinitebench --data f", "eval retrieval --data f", "bench decoders")
    for line in lines:
        assert (parsed(line).store, parsed(line).cache) == (None, None)
    assert parsed("eval qa --data f").store == str(here / "kb")
    for line in lines:
        file.write_text(f"[{'.'.join(line.split()[:2])}]\nstore = 'own'\n")
        assert parsed(line).store == str(here / "own")


def test_the_documented_file_is_read(here: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    write(here / "pdllm.toml", page.partition("```toml\n")[2].partition("```")[0])
    args = parsed("ask q")
    assert (args.store, args.k, args.filter, args.stop) == (str(here / "kb"), 3, {"year": "2025"}, ["\n\n"])
    assert parsed("eval qa").data == str(here / "questions.jsonl")
    assert (parsed("serve").port, parsed("serve").request_seconds) == (8080, "60")


def test_a_broken_file_does_not_keep_help_from_being_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "pdllm.toml", "[nonsense]\n")
    with pytest.raises(SystemExit) as leaving:
        parsed("ask --help")
    assert leaving.value.code == 0
    assert "--threshold" in capsys.readouterr().out


def test_a_model_for_all_commands_is_no_reason_to_refuse_a_verification(
    here: Path, pdllm: Pdllm, filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "pdllm.toml", "[default]\nmodel = 'demo'\n")
    assert pdllm("store", "verify", "--store", filled).status == 0
    with pytest.raises(SystemExit):
        pdllm("store", "verify", "--store", filled, "--model", "demo")
    assert "--recompute is missing" in capsys.readouterr().err
