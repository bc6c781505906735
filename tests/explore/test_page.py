"""The page in a real Chromium: a person's path through each tab, contrast, phones, many users, and what is not served."""

import http.client
import json
import shutil
import statistics
import threading
import time
import zipfile
from urllib.parse import urlsplit

import pytest
from browser import axe_finds

pytestmark = pytest.mark.slow  # a server and a browser


def test_from_typing_to_a_rewritten_prediction(visit):
    page = visit()
    grid = page.locator(".refining").first
    page.get_by_label("Text").fill("the monk is [MASK] in avon .")
    grid.locator("tbody th", has_text="monk").wait_for()
    assert grid.locator("tr.masked").count() == 1
    page.get_by_role("button", name="avon", exact=True).click()  # a word is masked by a click
    page.wait_for_function("document.querySelectorAll('.refining')[0].querySelectorAll('tr.masked').length === 2")
    assert page.get_by_label("Text").input_value() == "the monk is [MASK] in [MASK] ."
    slider = grid.get_by_label("Read after step")
    assert slider.input_value() == "4"
    slider.fill("1")
    assert grid.locator("td.read").count() == grid.locator("tbody tr").count()
    word = grid.locator("tr.masked td.read span").first.evaluate("e => e.firstChild.textContent")
    assert grid.locator(".reading mark").first.inner_text() == word
    slider.fill("7")
    assert grid.locator("output").inner_text() == "7 (3 untrained)"
    grid.locator("tr.masked td.read").first.hover()
    detail = grid.locator(".detail").inner_text()
    assert detail.startswith("[MASK], step 7: ")
    assert detail.count("%") == 5
    grid.get_by_label("gates").check()
    assert grid.locator("tr.masked td.read .gate").first.is_visible()
    assert "on average, from" in detail
    grid.locator(".scroll").focus()
    page.keyboard.press("ArrowLeft")
    assert grid.locator(".detail").inner_text().startswith("[MASK], step 6: ")


def test_a_new_text_keeps_the_step(visit):
    page = visit()
    page.get_by_label("Read after step").fill("2")
    page.get_by_label("Text").fill("these geese have [MASK] boots .")
    page.locator(".refining tbody th", has_text="geese").first.wait_for()
    assert page.get_by_label("Read after step").input_value() == "2"


def test_a_head_is_removed_brought_back_and_downloaded(visit, tmp_path):
    page = visit()
    page.get_by_role("tab", name="Reorganise").click()
    worth = page.locator("#worth")
    before = worth.inner_text()
    page.get_by_role("button", name="head 1 of refiner 0", exact=True).click()
    page.get_by_role("button", name="head 1 of refiner 0, removed").wait_for()
    assert worth.inner_text() != before
    with page.expect_download() as download:
        page.get_by_text("Download the smaller model").click()
    with zipfile.ZipFile(download.value.path()) as archive:
        assert "model.safetensors" in archive.namelist()
    page.get_by_role("button", name="head 0 of refiner 0", exact=True).click()
    page.get_by_text("would leave none").wait_for()
    page.get_by_role("button", name="Measure speed").click()
    page.get_by_text("tokens per second").wait_for()
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="head 1 of refiner 0", exact=True).wait_for()
    assert worth.inner_text() == before
    page.locator("input[aria-label=Model]:visible").click()
    page.get_by_role("option", name="ddl").click()
    page.get_by_role("button", name="head 1 of layer 1", exact=True).click()
    page.get_by_text("now: the").wait_for()  # a decoder's sample


def test_a_decoder_goes_on_and_tells_what_it_wrote(visit):
    page = visit()
    page.get_by_role("tab", name="Rewrite").click()
    grid = page.locator(".rewriting")
    page.get_by_label("Text to continue").fill("these geese")
    page.get_by_role("button", name="Go on").click()
    grid.locator("tbody th", has_text="geese").wait_for()
    first = grid.locator(".reading").inner_text()
    page.get_by_label("Seed").fill("7")
    page.wait_for_function("text => document.querySelector('.rewriting .reading').innerText !== text", arg=first)
    grid.locator("tr.masked td").nth(2).hover()
    assert "the target was" in grid.locator(".detail").inner_text()


def test_a_run_is_followed_while_it_trains(visit, young_run, trained_run):
    page = visit()
    page.get_by_role("tab", name="Runs").click()
    young = page.locator("#runs tbody tr", has_text="young")
    assert "3 of 20" in young.inner_text()
    assert "training" in young.inner_text()
    assert page.locator(".curves svg").count() == 1
    shutil.copy(trained_run / "metrics.jsonl", young_run)
    young.filter(has_text="20 of 20").wait_for()


@pytest.mark.parametrize(("width", "scheme"), [(1366, "light"), (390, "dark")])
def test_it_can_be_read_by_everybody(visit, width, scheme):
    """Every tab of one visit: loading the page takes longer than looking through it."""
    page = visit(width=width, color_scheme=scheme)
    for tab in ("Refine", "Rewrite", "Reorganise", "Runs"):
        page.get_by_role("tab", name=tab).click()
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)  # colours change over a moment
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
        assert axe_finds(page) == [], tab


def test_problems_are_told_on_the_page(visit):
    page = visit()
    page.get_by_role("alert").filter(has_text="cannot load").wait_for()  # the broken model
    page.get_by_label("Text").fill("fox " * 100)
    page.get_by_text("shorten it").wait_for()
    page.get_by_label("Text").fill("a fox [MASK]")
    page.locator(".refining tr.masked").first.wait_for()


def test_users_do_not_see_each_others_text(visit):
    one, other = visit(), visit()
    one.get_by_label("Text").fill("these geese [MASK] .")
    one.locator(".refining tbody th", has_text="geese").first.wait_for()
    other.get_by_role("button", name="amber", exact=True).click()
    other.wait_for_function("document.querySelector('.refining').querySelectorAll('tr.masked').length === 3")
    assert one.get_by_label("Text").input_value() == "these geese [MASK] ."
    one.context.close()  # somebody leaves; the page goes on
    other.get_by_role("button", name="hats", exact=True).click()
    other.wait_for_function("document.querySelector('.refining').querySelectorAll('tr.masked').length === 4")


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file={run}/config.yaml",
        "/file={run}/config.yaml",
        "/gradio_api/file/{run}/config.yaml",
        "/gradio_api/proxy=http://example.com/",
        "/static/../../../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/gradio_api/info",
        "/monitoring",
        "/gradio_api/upload",
        "/reorganised.zip?model=/etc&without=0.1",
        "/reorganised.zip?model=tiny&without=../../x",
        "/reorganised.zip?model=tiny&without=9.9",
    ],
)
def test_nothing_but_the_page_is_served(address, trained_run, path):
    asked = http.client.HTTPConnection(urlsplit(address).netloc)
    asked.request("GET", path.format(run=trained_run))
    assert asked.getresponse().status in (400, 403, 404)


def test_it_answers_to_its_own_name_only(address):
    asked = http.client.HTTPConnection(urlsplit(address).netloc)
    asked.request("GET", "/", headers={"Host": "evil.example"})
    assert asked.getresponse().status == 400


@pytest.mark.parametrize("function", [-1, 99, "x", [], None])
def test_a_function_that_the_page_does_not_have_is_refused(address, function):
    asked = http.client.HTTPConnection(urlsplit(address).netloc)
    body = json.dumps({"data": [], "event_data": None, "fn_index": function, "session_hash": "s"})
    asked.request("POST", "/gradio_api/queue/join", body, {"Content-Type": "application/json"})
    assert asked.getresponse().status == 400


def test_ten_users_at_once(address):
    """Each sends ten texts, one after the other. 95 of 100 answers come within a second on two free cores; the limit here
    leaves room for a machine that does something else, too."""
    taken = []

    def use(user: int) -> None:
        for turn in range(10):
            begun = time.monotonic()
            answer = ask(address, f"user{user}", ["tiny", "bert", f"the fox is [MASK] {'hats ' * turn}.", None])
            taken.append(time.monotonic() - begun)
            assert answer["success"], answer
            assert answer["output"]["data"][2].count('class="refining pointable"') == 2

    users = [threading.Thread(target=use, args=(number,)) for number in range(10)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert len(taken) == 100
    slow = statistics.quantiles(taken, n=20)[-1]
    print(f"p95 {slow:.2f} s, median {statistics.median(taken):.2f} s")
    assert slow < 4


def ask(address: str, session: str, data: list) -> dict:
    """What the page's first function answers, as the browser asks it: join the queue, then read events."""
    server = urlsplit(address).netloc
    join, events = http.client.HTTPConnection(server), http.client.HTTPConnection(server)
    body = json.dumps({"data": data, "event_data": None, "fn_index": 0, "session_hash": session})
    join.request("POST", "/gradio_api/queue/join", body, {"Content-Type": "application/json"})
    assert join.getresponse().status == 200
    events.request("GET", f"/gradio_api/queue/data?session_hash={session}")
    for line in events.getresponse():
        if line.startswith(b"data: ") and (event := json.loads(line[6:]))["msg"] == "process_completed":
            return event
    raise AssertionError("the server went away")
