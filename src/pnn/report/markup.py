"""HTML from small functions. Whatever is not already `Html` is escaped on its way in, so no caller can forget to."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is markup already."""


def html(value: object) -> Html:
    """Escaped, and with numbers and their units kept on one line."""
    if isinstance(value, Html):
        return value
    return Html(re.sub(r"(?<=\d) (?=%|points?\b)", "\u00a0", escape(str(value))))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(html(part) for part in parts))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """`tag("p", "text", class_="note")`; a trailing underscore lets attributes be named like Python keywords."""
    names = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    written = "".join(f' {name}="{escape(str(value))}"' for name, value in names)
    return Html(f"<{name}{written}>{join(content)}</{name}>")


def heading(level: int, text: str, name: str = "") -> Html:
    """A heading with an address. `name` tells apart those that read alike."""
    return tag(f"h{level}", text, id=anchor(name or text))


def anchor(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def section(title: str, *content: object) -> Html:
    return tag("section", heading(2, title), *content)


def contents(body: Html) -> Html:
    """Links to all headings of a page."""
    found = re.findall(r'<h([23]) id="(.*?)">(.*?)</h\1>', body)
    links = [tag("li", tag("a", Html(text), href=f"#{name}"), class_=f"level{level}") for level, name, text in found]
    return tag("nav", tag("ol", *links), aria_label="Contents")


def table(head: Sequence[object], rows: Sequence[Sequence[object]], caption: object = "") -> Html:
    """A table whose first column names the row. Cells that are `Html` of a <td> are taken as they are."""
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    body = tag("tbody", *(tag("tr", tag("th", row[0], scope="row"), *map(cell, row[1:])) for row in rows))
    title = tag("caption", caption) if caption else ""
    return scrolling("table", tag("table", title, top, body))


def cell(value: object, **attributes: object) -> Html:
    if isinstance(value, Html) and value.startswith("<td"):
        return value
    return tag("td", value, **attributes)


def image(png: bytes, width: int, description: str) -> Html:
    """An embedded picture on a white card. On a narrow window it keeps a legible size and the card scrolls."""
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    picture = f'<img src="{source}" alt="{escape(description)}" width="{width}" style="min-width:{min(width, 620)}px">'
    return tag("figure", scrolling("figure", Html(picture)), class_="card")


def scrolling(what: str, content: Html) -> Html:
    """In a narrow window it scrolls in its own box, also by the keyboard."""
    return tag("div", content, class_="scroll", tabindex=0, role="group", aria_label=what)
