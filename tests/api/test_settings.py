"""Settings of the service: options, environment, file."""

import tomllib
from dataclasses import fields

import pytest

from hashseek.api.settings import Settings


def test_options_win_over_variables_over_the_file_over_defaults(hashseek, tmp_path):
    file = tmp_path / "service.toml"
    file.write_text('collection = "pictures"\nport = 1\nmax_k = 1\nmax_uploads = 1\nallowed_hosts = ["a", "b"]\n')
    before = "os.environ |= {'HASHSEEK_PORT': '2', 'HASHSEEK_MAX_K': '2', 'HASHSEEK_READ_ONLY': '1'}"
    code, printed, _ = hashseek("serve", "--config", file, "--port", 3, "--print-config", before=before)
    values = tomllib.loads(printed)
    assert (code, values["collection"], values["allowed_hosts"]) == (0, "pictures", ["a", "b"])
    assert (values["port"], values["max_k"], values["max_uploads"]) == (3, 2, 1)
    assert (values["read_only"], values["host"]) == (True, Settings.host)
    unset = {line.split()[1] for line in printed.splitlines() if line.startswith("# ")}
    assert values.keys() | unset == {field.name for field in fields(Settings)}
    file.write_text(printed)  # what is printed can be read
    assert hashseek("serve", "--config", file, "--print-config")[1] == printed


def test_a_variable_that_is_not_a_number_is_refused_in_one_line(hashseek, tmp_path):
    code, out, err = hashseek("serve", tmp_path, before="os.environ['HASHSEEK_MAX_K'] = 'many'")
    assert (code, out, err.count("\n"), "HASHSEEK_MAX_K" in err) == (2, "", 1, True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('port = "many"', ("port", "many")),
        ("prot = 1", ("prot", "port")),
        ('allowed_hosts = "a"', ("allowed_hosts",)),
        ("port", ()),
        ("port = 70000", ("port", "70000", "65535")),
    ],
)
def test_a_file_with_something_else_is_refused_in_one_line(hashseek, tmp_path, text, named):
    file = tmp_path / "service.toml"
    file.write_text(text)
    code, out, err = hashseek("serve", tmp_path, "--config", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(value in err for value in named)
