"""The page itself: tabs, what a person sets, and which function answers. Each user has their own state (`gr.State`)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from pnn.errors import UserError
from pnn.explore import refine, reorganise, rewrite, runs
from pnn.explore.subjects import Subject
from pnn.report.markup import Html, tag
from pnn.report.refining import resource

try:
    import gradio as gr
except ImportError:  # the extra `app`, which the command asks for
    gr = None

FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "sans-serif"]
MONO = ["ui-monospace", "Menlo", "Consolas", "Liberation Mono", "monospace"]
NOBODY = "no other"
FOLLOW = 3.0  # seconds between two looks at runs
# A click on a button that has data-index is told with that index. A new value keeps the slider and the focus where they were.
ON_LOAD = """
let last = null;
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-index]');
  if (button) trigger('click', {index: last = button.dataset.index});
});
watch('value', () => {
  window.pnnRefining.restore(element);
  if (last !== null) element.querySelector(`button[data-index="${last}"]`)?.focus();
  last = null;
});
window.pnnRefining.restore(element);
"""
OURS = {"js_on_load": ON_LOAD, "apply_default_css": False}  # of what we write ourselves
QUIET = {"show_progress": "hidden", "trigger_mode": "always_last"}  # answers come at once; of fast clicks the last counts


def build(subjects: list[Subject], problems: list[str], folders: list[Path]) -> gr.Blocks:
    """`folders`: the runs among what was named."""
    with gr.Blocks(title="pnn explore", analytics_enabled=False) as page:
        gr.HTML("<h1>Look inside</h1>", elem_classes="title")
        for told in problems:
            gr.HTML(problem(told), apply_default_css=False)
        tabs = {
            "Refine": (_refine, [subject for subject in subjects if subject.refines]),
            "Rewrite": (_rewrite, [subject for subject in subjects if subject.rewrites]),
            "Reorganise": (_reorganise, [subject for subject in subjects if subject.reorganises]),
        }
        for name, (fill, able) in tabs.items():
            if able:
                with gr.Tab(name):
                    fill(able)
        if folders:
            with gr.Tab("Runs"):
                _runs(tuple(folders))
    return page


def problem(told: object) -> Html:
    return tag("p", str(told), class_="problem", role="alert")


def looks() -> dict[str, Any]:
    """Theme, style and script, all from here: nothing is fetched from another host."""
    theme = gr.themes.Base(font=FONT, font_mono=MONO, primary_hue="sky", neutral_hue="zinc")
    css = resource("refining.css") + (resources.files("pnn.explore") / "page.css").read_text(encoding="utf-8")
    # in the head: gradio rewrites what it is given as `css`, and takes :is(…) apart
    return {"theme": theme, "head": f"<style>{css}</style><script>{resource('refining.js')}</script>"}


def _shown_first(subjects: list[Subject]) -> Subject:
    """A PNN where there is one: in a folder of runs the names are sorted, and would begin with a baseline."""
    return next((one for one in subjects if one.has_steps), subjects[0])


def _refine(subjects: list[Subject]) -> None:
    named = {subject.name: subject for subject in subjects}
    first = _shown_first(subjects)
    text = refine.example(first)
    # a PNN and a BERT, where both are there
    second = next((one for one in subjects if one.has_steps != first.has_steps), subjects[-1]).name if subjects[1:] else NOBODY
    gr.Markdown(
        "Type a text and click words to mask them. Each row is a token, each column a step: what the head reads there, "
        "the more certain the darker. Move the slider to see the text being rewritten, also past the trained steps."
    )
    known = gr.State(refine.pieces(text))
    with gr.Row():
        with gr.Column(scale=3):
            entry = gr.Textbox(text, label="Text", lines=2)
            words = gr.HTML(refine.words(text, refine.pieces(text)), elem_id="words", **OURS)
        with gr.Column(min_width=180):
            model = gr.Dropdown(list(named), value=first.name, label="Model")
            other = gr.Dropdown([NOBODY, *named], value=second, label="Side by side with", visible=len(named) > 1)

    def chosen(model: str, other: str) -> list[Subject]:
        return [named[name] for name in dict.fromkeys((model, other)) if name != NOBODY]

    grids = gr.HTML(refine.grids(chosen(first.name, second), text), elem_id="grids", **OURS)

    def answer(model: str, other: str, text: str, known: list[str]) -> tuple[str, list[str], str]:
        known = refine.originals(text, known)
        return refine.words(text, known), known, refine.grids(chosen(model, other), text)

    def click(text: str, known: list[str], event: gr.EventData) -> str:
        return refine.toggled(text, refine.originals(text, known), int(event.index))

    gr.on([entry.change, model.change, other.change], answer, [model, other, entry, known], [words, known, grids], **QUIET)
    words.click(click, [entry, known], entry, **QUIET)  # which changes the text, and so the rest


def _rewrite(subjects: list[Subject]) -> None:
    named = {subject.name: subject for subject in subjects}
    gr.Markdown(
        "Let a decoder go on with a text. Each row is a token, each column a sublayer: β says how far the state was rewritten "
        "there. Point at a cell to see what was read, what the target was and what stands there now."
    )
    with gr.Row():
        with gr.Column(scale=3):
            entry = gr.Textbox(rewrite.prompt(subjects[0]), label="Text to continue", lines=2)
        with gr.Column(min_width=180):
            model = gr.Dropdown(list(named), value=subjects[0].name, label="Model", visible=len(named) > 1)
            temperature = gr.Slider(0, 2, 0.8, step=0.1, label="Temperature")
    with gr.Row():
        tokens = gr.Slider(1, rewrite.MOST_TOKENS, 16, step=1, label="New tokens")
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1)
        go = gr.Button("Go on", variant="primary")

    def answer(name: str, text: str, temperature: float, seed: int | None, tokens: int) -> str:
        try:
            return rewrite.grid(rewrite.continued(named[name], text, temperature, seed or 0, tokens))
        except UserError as error:
            return problem(error)

    settings = [model, entry, temperature, seed, tokens]
    result = gr.HTML(answer(*(one.value for one in settings)), elem_id="rewriting", **OURS)
    gr.on([go.click, entry.submit, temperature.change, seed.change, tokens.change], answer, settings, result, **QUIET)
    model.change(lambda name: rewrite.prompt(named[name]), model, entry, **QUIET).then(answer, settings, result, **QUIET)


def _runs(folders: tuple[Path, ...]) -> None:
    gr.Markdown("The runs that were named, as they are now. While one trains, this follows.")
    now = runs.seen(folders)
    known, shown = gr.State(now), gr.HTML(runs.overview(folders, now), elem_id="runs", apply_default_css=False)

    def look(before: Any) -> Any:
        now = runs.seen(folders)
        return (gr.skip(), gr.skip()) if now == before else (now, runs.overview(folders, now))

    gr.Timer(FOLLOW).tick(look, known, [known, shown], **QUIET)


def _reorganise(subjects: list[Subject]) -> None:
    named = {subject.name: subject for subject in subjects}
    first = _shown_first(subjects)
    text = reorganise.sample_text(first)
    gr.Markdown(
        "Click heads to remove them, and see what the model is worth without them. It is really cut smaller: the download is "
        "that model, and loads like any other after `import pnn`."
    )
    removed = gr.State([])
    model = gr.Dropdown(list(named), value=first.name, label="Model", visible=len(named) > 1)
    with gr.Row():
        with gr.Column(min_width=300):
            heads = gr.HTML(reorganise.head_buttons(first, []), elem_id="heads", **OURS)
            with gr.Row():
                undo = gr.Button("Undo", size="sm", min_width=90)
                reset = gr.Button("Put all back", size="sm", min_width=90)
                timing = gr.Button("Measure speed", size="sm", min_width=90)
        with gr.Column(min_width=300):
            result = gr.HTML(reorganise.comparison(first, [], text), elem_id="worth", **OURS)
    entry = gr.Textbox(text, label="Text to measure on", lines=4, max_lines=8)

    def shown(name: str, now: list[Any], text: str, timed: bool = False) -> tuple[list[Any], str, str]:
        subject, now = named[name], [tuple(head) for head in now]
        try:
            told = reorganise.comparison(subject, now, text, timed)
        except UserError as error:
            told = problem(error)
        return now, reorganise.head_buttons(subject, now), told

    def click(name: str, now: list[Any], text: str, event: gr.EventData) -> tuple[list[Any], str, str]:
        now = [tuple(head) for head in now]
        try:
            return shown(name, reorganise.toggled(named[name], now, event.index), text)
        except UserError as error:  # the last head of a layer
            return now, reorganise.head_buttons(named[name], now), problem(error)

    settings, outputs = [model, removed, entry], [removed, heads, result]
    heads.click(click, settings, outputs, **QUIET)
    undo.click(lambda name, now, text: shown(name, now[:-1], text), settings, outputs, **QUIET)
    reset.click(lambda name, now, text: shown(name, [], text), settings, outputs, **QUIET)
    timing.click(lambda name, now, text: shown(name, now, text, timed=True), settings, outputs, trigger_mode="once")
    entry.change(shown, settings, outputs, **QUIET)
    # another model has another text, where its tokenizer knows other words
    model.change(lambda name: ([], reorganise.sample_text(named[name])), model, [removed, entry], **QUIET).then(
        shown, settings, outputs, **QUIET
    )
