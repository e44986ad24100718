"""Docstrings are written to be read in an editor: Markdown's code spans and tables. Here they become reStructuredText.

Code spans become literals, tables list-tables, indented blocks literal blocks; a `*`, `|` or trailing `_` elsewhere
is a character and no markup. Doctests and the sections that napoleon reads (`Args:`) stay as they are.
"""

import re

from sphinx.application import Sphinx

_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example|Examples|Attributes|Note):$")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")
_SPECIAL = re.compile(r"(?<!\*)(\*)(?!\*)|(\|)|(?<=\w)(_)(?!\w)")


def convert(lines: list[str]) -> list[str]:
    r"""The lines of one docstring.

    Example:
        >>> convert(["The `norm` |x| of x."])
        ['The ``norm`` \\|x\\| of x.']
    """
    done: list[str] = []
    index, in_section = 0, False
    while index < len(lines):
        line = lines[index]
        in_section = in_section or bool(_SECTION.match(line))
        blank_before = index > 0 and not lines[index - 1].strip()
        if line.lstrip().startswith("|"):
            end = _end(lines, index, lambda text: text.lstrip().startswith("|"))
            done += _table(lines[index:end])
        elif line.lstrip().startswith(">>>"):
            end = _end(lines, index, lambda text: bool(text.strip()))
            done += lines[index:end]
        elif not in_section and blank_before and line.startswith("    "):
            end = _end(lines, index, lambda text: text.startswith("    ") or not text.strip())
            done += ["::", "", *lines[index:end]]
        else:
            end = _end(lines, index + 1, lambda text: bool(text.strip()) and not _starts_block(text))
            done += _prose("\n".join(lines[index:end])).split("\n")
        index = max(end, index + 1)
    return done


def _starts_block(text: str) -> bool:
    return text.lstrip().startswith(("|", ">>>")) or bool(_SECTION.match(text))


def _end(lines: list[str], start: int, belongs) -> int:
    end = start
    while end < len(lines) and belongs(lines[end]):
        end += 1
    return end


def _prose(text: str) -> str:
    parts, last = [], 0
    for code in _CODE.finditer(text):
        inside = (
            re.sub(r"\s+", " ", code[1]) if "\n" not in code[1] else code[1]
        ).strip()  # no literal ends with a space
        parts += [_escaped(text[last : code.start()]), f"``{inside}``", f"\\ {code[2]}" if code[2] else ""]
        last = code.end()
    return "".join(parts) + _escaped(text[last:])


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda match: "\\" + match[0], text)


def _table(lines: list[str]) -> list[str]:
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]
    out = ["", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", ""]
    for row in [rows[0], *rows[2:]]:
        for column, cell in enumerate(row):
            out.append(f"{indent}   {'*' if column == 0 else ' '} - {_prose(cell)}")
    return [*out, ""]


def _on_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = convert(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Runs before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", _on_docstring, priority=400)
    return {"parallel_read_safe": True}
