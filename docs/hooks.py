"""What the site needs beyond its plugins.

- A link that leaves docs/ means a file of the repository. The site takes that file in at the same place, so that the same
  link works here and in a checkout: ../results/x/README.md becomes the page results/x/README.md.
- `<!-- needs: gpu -->` before a block becomes a line that readers see.
- A page that says "Not run yet" goes without the figures that it will have.
- The one script that the theme would take from another host, for searching in a site opened from the disk, is ours.
- `<!-- fields: src/pnn/config.py DataConfig -->` becomes the class's fields with their comments, which are their documentation.
- The emphasised line under a picture is its caption. A picture is a link to itself: on a phone its words are too small to read.
- The table of contents of a page without headings has the bold words that its paragraphs begin with.
- A long command goes on in the next line, indented. Lines never end inside an option (--data), inside 2e-3, or before a %.
- `<!-- refining: refining.json -->` becomes grids of predictions with a slider, one per model of that file.
- Equations become MathML when the site is built: browsers draw it themselves, with the font in docs/fonts. One that is wider
  than a phone scrolls, also by the keyboard.
- What the theme leaves without a name for those who listen to a page has one.
"""

from __future__ import annotations

import ast
import html
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.toc import AnchorLink, TableOfContents
from mkdocs.utils import get_relative_url

from pnn.report.markup import Html, tag
from pnn.report.refining import grid, resource

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = "docs"
RESULTS = sorted(p.relative_to(REPOSITORY).as_posix() for p in REPOSITORY.glob("results/*/README.md"))
PAGES = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", *RESULTS]
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
FIGURE = re.compile(r"!\[[^\]]*\]\((figures/[^)]+)\)(\n\*[^\n]+\*)?")
NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)
WORDS = {
    "gpu": "Needs a GPU.",
    "hub": "Needs the Hugging Face hub, or files that you have.",
    "files": "Needs files that you have.",
    "install": "Installs packages.",
    "package": "Needs another package.",
    "machines": "Needs several machines.",
    "browser": "Opens a page in the browser.",
    "time": "Takes minutes to hours on a CPU.",
}
SEARCH = 'data-md-component="search" role="dialog"'
SHIM = "https://unpkg.com/iframe-worker/shim"
FIELDS = re.compile(r"<!-- fields: (\S+) (\w+) -->")
REFINING = re.compile(r"<!-- refining: (\S+) -->")
MATH = re.compile(r'(\(?)<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\2>([.,;:)]*)', re.DOTALL)
COMMANDS = re.compile(r'<div class="language-bash.*?</div>', re.DOTALL)
CODE_OR_NUMBER = re.compile(r"<(pre|code)\b.*?</\1>|<[^>]*>|(?<=\d) %|\b\d[\d.]*e-\d+\b", re.DOTALL)
BOLD_BEGINNING = re.compile(r"<p>(?=<strong>(.+?)</strong>)")
FEW = 4  # beginnings are no table of contents
OPTION = re.compile(r"(?<![^\s>])--?[a-z][\w-]*|\b\d[\d.]*e-\d+\b")
FIGURE_WITH_CAPTION = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)\s*<em>(.*?)</em></p>', re.DOTALL)


def _in_repository(page: str) -> str:
    """Where a page's file is: those that the site took in have their own place."""
    return page if (REPOSITORY / page).exists() and not (REPOSITORY / DOCS / page).exists() else f"{DOCS}/{page}"


def _in_site(path: str) -> str:
    return "index.md" if path == "README.md" else path.removeprefix(f"{DOCS}/")  # each is the first page where it is


def _targets(page: str, markdown: str) -> dict[str, str]:
    """Every link of a page to a file that is there → that file, from the repository's root."""
    here = posixpath.dirname(_in_repository(page))
    found = {link: posixpath.normpath(posixpath.join(here, link)) for link in LINK.findall(markdown)}
    return {link: path for link, path in found.items() if not path.startswith("..") and (REPOSITORY / path).is_file()}


def _fields(match: re.Match[str]) -> str:
    text = (REPOSITORY / match[1]).read_text(encoding="utf-8")
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == match[2])
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign) and node.end_lineno]
    lines = text.splitlines()[found.lineno - 1 : max(node.end_lineno or 0 for node in fields)]
    return "```{.python .fields}\n" + "\n".join(line for line in lines if "keys_to_ignore" not in line) + "\n```\n"


def taken_in(pages: list[str]) -> set[str]:
    """The files outside docs/ that these pages link to, and what the pages among those link to."""
    pages, wanted = [*pages, *PAGES], set(PAGES)
    for page in pages:  # grows meanwhile
        markdown = (REPOSITORY / _in_repository(page)).read_text(encoding="utf-8")
        found = {path for path in _targets(page, markdown).values() if not path.startswith(f"{DOCS}/")}
        new = sorted(found - wanted - {"README.md"})
        pages += [path for path in new if path.endswith(".md")]
        wanted.update(new)
    return wanted


def on_files(files: Files, config: Any) -> Files:
    for path in sorted(taken_in([file.src_uri for file in files.documentation_pages()])):
        files.append(File.generated(config, path, abs_src_path=str(REPOSITORY / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    targets = _targets(here, markdown)

    def moved(match: re.Match[str]) -> str:
        path = targets.get(match[0])
        return match[0] if path is None else os.path.relpath(_in_site(path), posixpath.dirname(here) or ".")

    if "Not run yet" in markdown:
        markdown = FIGURE.sub(lambda match: match[0] if match[1] in targets else "", markdown)
    markdown = LINK.sub(moved, markdown)
    markdown = FIELDS.sub(_fields, markdown)
    return NEEDS.sub(lambda match: f'<p class="needs">{WORDS[match[1]]}</p>\n', markdown)


def _refining(match: re.Match[str]) -> str:
    models = json.loads((REPOSITORY / DOCS / match[1]).read_text(encoding="utf-8"))
    grids = [grid(found, name, only_masks=True) for name, found in models.items()]
    style, script = tag("style", Html(resource("refining.css"))), tag("script", Html(resource("refining.js")))
    return style + tag("div", *grids, class_="side-by-side") + script


def on_page_content(content: str, page: Any = None, **_: Any) -> str:
    def drawn(match: re.Match[str]) -> str:
        before, tag, equation, after = match.groups()  # brackets and full stops stay on the equation's line
        drawing = convert(html.unescape(equation), display="block" if tag == "div" else "inline")
        focus = ' tabindex="0"' if tag == "div" else ""
        return f'<{tag} class="equation"{focus}>{before}{drawing}{after}</{tag}>'

    def unbroken(match: re.Match[str]) -> str:  # browsers would end a line after the dashes of --data
        return OPTION.sub(r'<span class="option">\g<0></span>', match[0])

    def whole(match: re.Match[str]) -> str:
        if match[0].startswith("<"):
            return match[0]
        return "\u00a0%" if match[0] == " %" else f'<span class="option">{match[0]}</span>'

    content = REFINING.sub(_refining, content)
    content = CODE_OR_NUMBER.sub(whole, content)
    if page and "<h2" not in content and len(BOLD_BEGINNING.findall(content)) >= FEW:
        content = _with_contents(content, page.toc)
    figure = r'<figure><a href="\2">\1</a><figcaption>\3</figcaption></figure>'
    return FIGURE_WITH_CAPTION.sub(figure, COMMANDS.sub(unbroken, MATH.sub(drawn, content)))


def _with_contents(content: str, contents: TableOfContents) -> str:
    title = next(iter(contents))

    def named(match: re.Match[str]) -> str:
        words = re.sub(r"<[^>]*>", "", match[1]).rstrip(".:")
        name = re.sub(r"\W+", "-", html.unescape(words).lower()).strip("-")
        while name in {link.id for link in title.children}:
            name += "-"
        title.children.append(AnchorLink(words, name, 2))
        return f'<p id="{name}">'

    return BOLD_BEGINNING.sub(named, content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return _named(output.replace(SHIM, get_relative_url("js/iframe_worker.js", page.url)))


def on_post_template(output_content: str, **_: Any) -> str:
    return _named(output_content.replace(SHIM, "js/iframe_worker.js"))


def _named(page: str) -> str:
    return page.replace(SEARCH, f'{SEARCH} aria-label="Search"')
