"""Files of every kind and condition become text, or say why not."""

import contextlib
import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdllm_rag.errors import DocumentError, EmptyDocumentError, UnreadableDocumentError
from pdllm_rag.readers import SourceText, parse, printable, read

DATA = Path(__file__).parent / "data"
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\6\0\0\0\x1f\x15\xc4\x89"


def pdf(*pages: str, title: str = "") -> bytes:
    """A PDF with one line of text per page; "" is a page without text."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    objects.append(f"<< /Title ({title}) >>")
    out = io.BytesIO(b"")
    out.write(b"%PDF-1.4\n")
    places = []
    for number, body in enumerate(objects, start=1):
        places.append(out.tell())
        out.write(f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1"))
    table = out.tell()
    out.write(f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode())
    out.write("".join(f"{place:010d} 00000 n \n" for place in places).encode())
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>"
    out.write(f"trailer\n{trailer}\nstartxref\n{table}\n%%EOF\n".encode())
    return out.getvalue()


def html(body: str, head: str = "") -> SourceText:
    return parse(f"<html><head>{head}</head><body>{body}</body></html>".encode(), name="page.html")


# text files


def test_markdown_is_kept_as_it_is():
    text = "# Head\r\n\r\n* re\u0301sume\u0301 [link](x)  \n"
    assert parse(text.encode(), name="a.md") == SourceText(text, None, "text/markdown", "utf-8", None)


def test_a_file_is_read_from_disk(tmp_path):
    (tmp_path / "A.TXT").write_bytes(b"hello")
    assert read(tmp_path / "A.TXT") == SourceText("hello", None, "text/plain", "utf-8", None)
    assert read(DATA / "sample.html").title == "A sample & its title"


@pytest.mark.parametrize(
    ("codec", "bom"),
    [
        ("utf-8", b"\xef\xbb\xbf"),
        ("utf-16-le", b"\xff\xfe"),
        ("utf-16-be", b"\xfe\xff"),
        ("utf-32-le", b"\xff\xfe\0\0"),
    ],
)
def test_a_byte_order_mark_decides_and_is_dropped(codec, bom, caplog):
    source = parse(bom + "Grüße 漢字".encode(codec), name="a.txt")
    assert (source.text, source.encoding) == ("Grüße 漢字", codec)
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "codec", "named"),
    [
        ("café — €", "cp1252", "cp1252"),
        ("The café – “naïve” résumé costs 5 €. It’s déjà vu.", "cp1252", "cp1252"),
        ("Müller wohnt in Düsseldorf und ißt Käse. Größe über alles.", "latin-1", "cp1252"),
        ("The quick brown fox is not naïve at all. " * 30 + "Señor", "latin-1", "cp1252"),
        ("Où est l'été ? Il était une fois, à Noël, une fenêtre ouverte. " * 30, "cp1252", "cp1252"),
        ("Zoë naïve", "latin-1", "cp1252"),
        ("Über", "latin-1", "cp1252"),
        ("El niño comió piñas.", "latin-1", "cp1252"),
        ("日本語のテキスト", "shift_jis", "cp932"),
        ("東京は日本の首都です。人口は約1400万人。Tokyo is the capital.", "shift_jis", "cp932"),
        ("これは日本語のテキストです。", "euc-jp", "euc_jp"),
        ("Привет, мир. Это обычный русский текст для проверки.", "cp1251", "cp1251"),
        ("Привет, мир. Это обычный русский текст.", "koi8-r", "koi8_r"),
        ("Zażółć gęślą jaźń. Łódź jest miastem w Polsce.", "cp1250", "cp1250"),
        ("Wszyscy ludzie rodzą się wolni i równi pod względem swej godności. " * 50, "cp1250", "cp1250"),
        ("安全测试：这是一个简单的中文文本，用于测试编码检测。", "gb18030", "gb18030"),
    ],
)
def test_other_encodings_are_guessed_with_a_warning(text, codec, named, caplog):
    source = parse(text.encode(codec), name="old.txt")
    assert (source.text, source.encoding) == (text, named)
    assert f"old.txt: not UTF-8, read as {named}" in caplog.text


def test_one_odd_byte_late_in_a_long_file_is_not_lost():
    text = "The quick brown fox. " * 5000 + "café"
    assert parse(text.encode("latin-1"), name="a.txt").text == text


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a", "a.log"])
@pytest.mark.parametrize("data", [PNG, b"text\0text", b"\0", b"PK\x03\x04abc", b"%PDF-1.4 abc"])
def test_binary_files_are_refused_whatever_their_name(name, data):
    with pytest.raises(UnreadableDocumentError, match=rf"^{name}: "):
        parse(data, name=name)


def test_bytes_that_are_no_text_in_any_encoding_are_refused():
    with pytest.raises(UnreadableDocumentError, match="no known encoding"):
        parse(bytes(range(1, 256)) * 4, name="a.txt")


def test_a_damaged_utf_16_file_is_refused():
    with pytest.raises(UnreadableDocumentError, match=r"utf-16-le but is damaged at byte 4"):
        parse(b"\xff\xfea\0b", name="a.txt")


def test_an_unknown_ending_is_text_only_if_it_is_utf_8():
    assert parse("grün".encode(), name="a.log").text == "grün"
    assert parse(b"\xef\xbb\xbfx", name="Makefile").text == "x"
    with pytest.raises(UnreadableDocumentError, match=r"'.log' is not supported; supported: .txt .md"):
        parse("grün".encode("latin-1"), name="a.log")
    with pytest.raises(UnreadableDocumentError, match=r"looks like a ZIP archive"):
        parse(b"PK\x03\x04", name="report.docx")


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a"])
@pytest.mark.parametrize("text", ["", "   \n\t", "\u200b\u200b", "\ufeff", "\ufeff\n\u2060"])
def test_files_without_anything_to_see_are_empty(name, text):
    with pytest.raises(EmptyDocumentError, match=rf"^{name}: "):
        parse(text.encode(), name=name)


@pytest.mark.parametrize(
    "text",
    [
        "![a cat](cat.png)",
        "\n[![x](a.png)](http://b)\n",
        '<img src="a.png">',
        "![cat][1]",
        "<!-- note -->\n![](x)",
    ],
)
def test_markdown_with_only_images_is_empty(text):
    with pytest.raises(EmptyDocumentError, match="only images"):
        parse(text.encode(), name="a.md")
    assert parse(f"{text}\na word".encode(), name="a.md").text == f"{text}\na word"


# HTML


def test_html_is_laid_out_without_links_scripts_and_menus():
    source = html(
        "<nav>menu</nav><h1>Head</h1><p>one <a href='u'>two</a></p><script>var x</script><style>a{}</style>"
        "<noscript>no js</noscript>"
        "<table><tr><td>a</td><td>b b</td></tr><tr><td>ccc</td><td>d</td></tr></table>"
        "<ul><li>x</li></ul><img alt='pic'>",
        head="<title> A &amp;\n B </title>",
    )
    assert source.text.split("\n\n") == ["Head", "one two", "| a | b b |\n| ccc | d |", "  * x"]
    assert (source.title, source.media_type, source.pages) == ("A & B", "text/html", None)


@pytest.mark.parametrize(
    "body", ["<script>alert('x')</script>", "<style>p{}</style>", "<img src=a.png>", "<nav>menu</nav>", ""]
)
def test_html_that_shows_no_text_is_empty(body):
    with pytest.raises(EmptyDocumentError, match="shows no text"):
        html(body)


@pytest.mark.parametrize("data", [b"<!-- only -->", b"<?xml version='1.0'?>", b"<script>x</script>"])
def test_html_fragments_without_text_are_empty(data):
    with pytest.raises(EmptyDocumentError):
        parse(data, name="a.htm")


@pytest.mark.parametrize(
    ("head", "text", "codec", "used"),
    [
        ('<meta charset="shift_jis">', "日本語", "shift_jis", "cp932"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=koi8-r">', "Мир", "koi8-r", "koi8-r"),
        ("<meta charset=iso-8859-1>", "“é” €", "cp1252", "cp1252"),
        ('<?xml version="1.0" encoding="iso-8859-2"?>', "Łódź", "iso8859-2", "iso8859-2"),
        ("<meta charset=utf-16>", "é", "utf-8", "utf-8"),
        ("", "é", "utf-8", "utf-8"),
    ],
)
def test_a_declared_charset_is_honoured(head, text, codec, used, caplog):
    source = parse(f"{head}<p>{text}</p>".encode(codec), name="a.html")
    assert (source.text, source.encoding) == (text, used)
    assert not caplog.records


@pytest.mark.parametrize("charset", ["ascii-art", "utf-8", "unicode_escape", "rot13", "utf-7"])
def test_a_wrong_charset_is_reported_and_the_text_kept(charset, caplog):
    source = parse(f"<meta charset={charset}><p>café +AGE- \\x41</p>".encode("latin-1"), name="a.html")
    assert source.text == "café +AGE- \\x41"
    assert f"declares the charset {charset}" in caplog.text


def test_deeply_nested_html_loses_nothing_or_is_refused():
    assert html("<div>" * 300 + "deep" + "</div>" * 300 + "<p>after").text.split() == ["deep", "after"]
    with pytest.raises(UnreadableDocumentError, match="nested too deeply"):
        html("<div>" * 5000 + "deep")


def test_a_layout_that_would_unfold_beyond_the_limit_is_refused_at_once():
    begin = time.perf_counter()
    with pytest.raises(UnreadableDocumentError, match="unfolds to at least"):
        html("<ul>" * 200 + "<li>x" * 60_000)
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<tr><th>Part<th>Price<tr><td>Buoy<td>12 EUR", "| Part | Price |\n| Buoy | 12 EUR |"),
        ("<caption>C</caption><thead><tr><th>a<th>b</thead><tbody><tr><td>c<td>d", "C\n| a | b |\n| c | d |"),
        ("<tr><td><p>Part\nno.</p><td><div>12<br>EUR</div>", "| Part no. | 12 EUR |"),
        ("<tr><td>k<td><ul><li>x<li>y</ul>", "| k | * x * y |"),
        ("<tr><td>a<td><td>b<tr><td> <td>&nbsp;", "| a | | b |"),
        ("<tr><td>a<tr><td>b", "a\nb"),
        ("<tr><td>a<td><div><tr><td>b<td>c</div>", "a\n\n  | b | c |"),
        ("<!-- c -->stray<tr><!-- c --><td>a<td style='display:none'>no<td><script>no</script>", "stray\n| a | | |"),
        ("<tr><td>Menu<td><h1>Head</h1><p>One.<p>Two.", "Menu\n\nHead\n\nOne.\n\nTwo."),
        ("<tr><td>1<br>2<td><pre>if a:\n  b</pre>", "1\n2\n\nif a:\n  b"),
        (
            "<tr><td>Boat<td><table><tr><td>length<td>3 m<tr><td>weight<td>2 t</table><td>red",
            "Boat\n\n| length | 3 m |\n| weight | 2 t |\n\nred",
        ),
    ],
)
def test_a_row_of_a_table_is_a_line_and_a_table_for_layout_is_none(body, text):
    assert html(f"<p>before<table>{body}</table><p>after").text == f"before\n\n{text}\n\nafter"


@pytest.mark.parametrize(
    "body",
    [
        "<table><tr><td>" + "x" * 100_000 + "</td></tr>" + "<tr><td>a<td>b</td></tr>" * 1000 + "</table>",
        "<table><tr><td>a<td>b<td>" * 150 + "c" + "</table>" * 150,
        "<table><tr><td>a" * 50 + "<tr><td>b<td>c" * 2000 + "</table>" * 50,
    ],
    ids=["wide", "nested", "nested and long"],
)
def test_a_table_takes_no_more_text_than_its_source(body):
    assert len(html(body).text) <= len(body)


def test_terms_and_their_definitions_are_lines():
    assert html("<dl><dt>Buoy<dd>It floats.<dt>Mast<dd>It stands.</dl>").text.split("\n") == [
        "Buoy", "It floats.", "Mast", "It stands."
    ]  # fmt: skip


# PDF


def test_pdf_pages_are_joined_and_can_be_named():
    source = parse(pdf("First page.", "", "Third page.", title="A title"), name="a.pdf")
    assert source.text == "First page.\n\nThird page."
    assert source.pages == [(0, 11), (11, 11), (13, 24)]
    assert (source.title, source.media_type, source.encoding) == ("A title", "application/pdf", None)


def test_a_sentence_among_blank_pages_is_found_on_its_page():
    source = parse(pdf("", "", "", "", "", "Here it is.", "", "", "", ""), name="a.pdf")
    assert source.text == "Here it is."
    assert source.pages == [(0, 0)] * 5 + [(0, 11)] + [(11, 11)] * 4


def test_a_pdf_without_a_text_layer_is_empty():
    with pytest.raises(EmptyDocumentError, match=r"no text layer in 2 page\(s\).*OCR"):
        parse(pdf("", ""), name="scan.pdf")


@pytest.mark.parametrize("data", [b"%PDF-1.4\n", b"not a pdf", PNG, pdf("x")[:200], b"%PDF-1.4\n" + b"\xff" * 500])
def test_a_broken_pdf_is_refused_with_a_reason(data):
    with pytest.raises(UnreadableDocumentError, match=r"^a.pdf: the PDF cannot be read \(\w+: "):
        parse(data, name="a.pdf")


@pytest.mark.parametrize(("password", "fails"), [("secret", True), ("", False)])
def test_an_encrypted_pdf_is_refused_unless_it_needs_no_password(password, fails):
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(PdfReader(io.BytesIO(pdf("Hidden words."))))
    writer.encrypt(password, "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    if fails:
        with pytest.raises(UnreadableDocumentError, match="encrypted"):
            parse(out.getvalue(), name="a.pdf")
    else:
        assert parse(out.getvalue(), name="a.pdf").text == "Hidden words."


def test_a_pdf_that_unfolds_beyond_the_limit_is_refused():
    with pytest.raises(UnreadableDocumentError, match=r"unfolds to at least .* the limit is 100"):
        parse(pdf(*["x" * 60] * 3), name="a.pdf", max_chars=100)


def test_remarks_on_a_damaged_pdf_stay_off_the_terminal(tmp_path):
    broken = pdf("Still here.").replace(b"startxref\n", b"startxref\n9")
    (tmp_path / "a.pdf").write_bytes(broken)
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        "from pdllm_rag.readers import read\n"
        "print(read(sys.argv[1]).text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.pdf")], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "Still here.\n"
    assert done.stderr == ""
    assert logging.getLogger("pypdf").propagate


# limits and paths


def test_a_file_over_the_limit_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "big.txt"
    with path.open("wb") as file:
        file.truncate(100 * 2**30)
    with pytest.raises(UnreadableDocumentError, match="the limit is 67,108,864"):
        read(path)
    with pytest.raises(UnreadableDocumentError, match="has 11 bytes, the limit is 10"):
        parse(b"x" * 11, name="a.txt", max_bytes=10)


def test_what_is_no_readable_file_says_so(tmp_path):
    with pytest.raises(UnreadableDocumentError, match="No such file"):
        read(tmp_path / "gone.txt")
    with pytest.raises(UnreadableDocumentError, match="not a regular file"):
        read(tmp_path)
    with pytest.raises(UnreadableDocumentError, match="cannot be read"):
        read("a\0b.txt")


@pytest.mark.parametrize(
    "data",
    [b"![" * 200_000, b"<title" * 80_000, b"[](" * 200_000, b"<!--" * 200_000, b"<meta charset" * 90_000],
)
@pytest.mark.parametrize("name", ["a.md", "a.html"])
def test_hostile_repetitions_take_linear_time(name, data):
    begin = time.perf_counter()
    with contextlib.suppress(DocumentError):
        parse(data, name=name)
    assert time.perf_counter() - begin < 5


def test_names_are_printable():
    assert printable(os.fsdecode(b"a\xffb\x1b[31m\n.txt")) == "a\\xffb\\x1b[31m\\n.txt"


def test_reading_text_imports_no_heavy_library():
    code = (
        "import sys; from pdllm_rag.readers import parse; parse(b'x', name='a.md')\n"
        "print([m for m in ('pypdf', 'inscriptis', 'lxml', 'charset_normalizer') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "[]\n"
