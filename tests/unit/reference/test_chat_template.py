"""Chat templates of a folder, rendered as transformers renders them."""

from __future__ import annotations

import json

import pytest

from graphkit.errors import CheckpointError
from graphkit.reference.chat_template import render_chat

MESSAGE = 'two\nlines, "é" <b>'
TEMPLATES = {
    "whitespace": "{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content }}]\n"
    "    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n<a>\n{% endif %}\n",
    "tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "loops": "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
    "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "no tools": "{% if tools is not none or documents is not none %}tools{% endif %}none",
    "generation": "{% generation %}{{ messages[0].role }}{% endgeneration %}.",
    "year": "{{ strftime_now('%Y') }}",
    "namespace": "{% set n = namespace(k=1) %}{% set n.k = 2 %}{{ n.k }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_is_the_text_of_transformers(tmp_path, name):
    from transformers.utils.chat_template_utils import render_jinja_template

    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (theirs,), _ = render_jinja_template(
        [[{"role": "user", "content": MESSAGE}]],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render_chat(tmp_path, MESSAGE) == theirs


@pytest.mark.parametrize(
    ("config", "file", "text"),
    [
        ({"chat_template": "of the config"}, None, "of the config"),
        ({"chat_template": "of the config"}, "of the file", "of the file"),
        (
            {"chat_template": [{"name": "tool_use", "template": "a"},
                               {"name": "default", "template": "b"}]},
            None,
            "b",
        ),
        (None, "of the file", "of the file"),
    ],
)  # fmt: skip
def test_the_file_comes_before_the_config(tmp_path, config, file, text):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    assert render_chat(tmp_path, MESSAGE) == text


@pytest.mark.parametrize("template", [None, 3, [], [{"name": "rag", "template": "x"}], ["x"]])
def test_a_folder_without_a_template_is_refused(tmp_path, template):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match="has no chat template"):
        render_chat(tmp_path, MESSAGE)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role.\\nNone') }}", "TemplateError: no system role. Pass"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: "),
        ("{{ messages.append(1) }}", "SecurityError: "),
        ("{{ messages[7].content }}", "UndefinedError: "),
        ("{% endfor %}", "TemplateSyntaxError: "),
        ("{{ 1 + 'a' }}", "TypeError: "),
    ],
)
def test_a_template_that_fails_is_an_error_of_one_line(tmp_path, template, reason):
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=r"the chat template of .* fails") as caught:
        render_chat(tmp_path, MESSAGE)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
