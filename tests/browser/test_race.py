"""A race: one answer after the other is timed, both are replayed side by side, and a sentence has the result."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from helpers.browsing import CHATS, TEXT, answer, event, said, serve, settings

COUNT_RUNS = """() => { const { run } = Panel.prototype; let running = 0; window.most = 0;
    Panel.prototype.run = async function (...all) {
        most = Math.max(most, ++running); try { return await run.apply(this, all); } finally { running--; } }; }"""
RECORD = """() => {
    const pass = (text) => ({ origins: [[text, "bonus"]], tokens: 1, drafted: 0 });
    const choice = (i) => ({ delta: { content: `w${i} ` }, foresay: pass(`w${i} `) });
    const parent = at("talk").appendChild(made("div"));
    window.one = new Panel(parent, newAnswer("speculation")); one.began = 1;
    for (let i = 0; i < 10; i++) one.take(choice(i), 1000 + 100 * i);
    one.take({ delta: {}, finish_reason: "stop" }, 1900);
    one.draw();
    window.ended = false; window.abort = new AbortController(); }"""
START = "() => { one.replay(abort.signal, 10).then(() => (ended = true)); }"


def made(kind: str, tokens: int, passes: int, seconds: float, spread: float = 0.02) -> dict[str, Any]:
    """An answer with a speed."""
    counts = {"tokens": tokens + 1, "untimed": 1, "passes": passes, "seconds": seconds, "spread": spread}
    return {"kind": kind, "reason": "stop", "pieces": [["same", "bonus"]], "exact": True, **counts}


def sentence(page: Page, *answers: dict[str, Any], drafter: str = "") -> str:
    turn = {"drafter": drafter, "sampling": {"temperature": 0}, "answers": list(answers)}
    return str(page.evaluate(f"comparison({json.dumps(turn)})"))


class TestReplay:
    def test_a_recorded_answer_appears_again_at_its_own_times(self, page: Page) -> None:
        page.clock.install()
        page.evaluate(RECORD)
        words, figures = page.locator(".answer .text").first, page.locator(".answer .figures").first
        expect(words).to_have_text("w0 w1 w2 w3 w4 w5 w6 w7 w8 w9")
        page.evaluate(START)
        expect(words).to_have_text("")
        expect(page.locator(".answer h2").first).to_have_text("with speculation · replayed as it was timed")
        page.clock.run_for(500)
        expect(words).to_have_text("w0 w1 w2 w3 w4")
        expect(figures).to_contain_text("10.0 tokens/s · 1.00 tokens per pass · 5 tokens · 0.40 s")
        assert page.locator("progress").evaluate("e => e.value / e.max") == 0.5
        page.clock.run_for(1000)
        expect(words).to_have_text("w0 w1 w2 w3 w4 w5 w6 w7 w8 w9")
        expect(figures).to_contain_text("10 tokens · 0.90 s")
        assert page.evaluate("ended") and page.locator(".answer h2").first.inner_text() == "with speculation"

    def test_a_stop_ends_it_with_the_whole_answer(self, page: Page) -> None:
        page.clock.install()
        page.evaluate(RECORD)
        page.evaluate(START)
        page.clock.run_for(200)
        assert not page.evaluate("ended") and 0 < page.evaluate("one.answer.tokens") < 10
        page.evaluate("abort.abort()")
        page.clock.run_for(100)
        expect(page.locator(".answer .text").first).to_have_text("w0 w1 w2 w3 w4 w5 w6 w7 w8 w9")
        assert page.evaluate("ended") and page.evaluate("one.answer.tokens") == 10

    def test_a_race_is_repeated_without_a_request(self, page: Page) -> None:
        bodies = serve(page, answer("a b c d"))
        page.locator("#compare").check()
        said(page, "go")
        before = page.locator(".answer").all_inner_texts(), page.locator(".outcome").inner_text()
        page.get_by_role("button", name="Race again").click()
        expect(page.locator("#send")).to_be_enabled()
        assert (page.locator(".answer").all_inner_texts(), page.locator(".outcome").inner_text()) == before
        assert len(bodies) == 2
        page.reload()
        expect(page.locator(".answer")).to_have_count(2)
        assert page.get_by_role("button", name="Race again").count() == 0, "times are not kept"

    def test_answers_are_timed_one_after_the_other_and_are_the_same(self, page: Page) -> None:
        page.evaluate(COUNT_RUNS)
        page.locator("#compare").check()
        said(page, TEXT, tokens=60)
        assert page.evaluate("most") == 1 and page.locator(".answer").count() == 2
        assert page.locator(".answer h2").all_inner_texts() == ["with speculation", "plain"]
        assert page.locator("progress:visible").count() == 0 and page.locator(".race").count() == 0
        expect(page.locator(".how")).to_contain_text("timed alone, one after the other")
        texts = page.locator(".answer .text").all_inner_texts()
        assert texts[0] == texts[1] != "" and "1.00 tokens per pass" in page.locator(".figures").last.inner_text()
        expect(page.locator(".outcome")).to_contain_text("oth texts are the same.")

    def test_the_second_waits_for_its_turn_and_the_first_is_kept_when_it_is_stopped(self, page: Page) -> None:
        page.route(CHATS, lambda route: None)  # never answered
        page.locator("#compare").check()
        settings(page, temperature="0")
        page.locator("#prompt").fill("go")
        page.keyboard.press("Enter")
        expect(page.locator(".answer h2")).to_have_text(
            ["with speculation · decoding now", "plain · waits for its turn"]
        )
        page.keyboard.press("Escape")
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("#prompt")).to_have_value("go")
        page.unroute(CHATS)
        streams = [answer("the first")]
        page.route(
            CHATS,
            lambda route: route.fulfill(content_type="text/event-stream", body=streams.pop()) if streams else None,
        )
        page.keyboard.press("Enter")
        expect(page.locator(".answer h2").last).to_have_text("plain · decoding now")
        page.keyboard.press("Escape")
        expect(page.locator(".answer .text")).to_have_text(["the first"])
        expect(page.locator("#send")).to_be_enabled()

    def test_an_error_in_the_second_keeps_the_first(self, page: Page) -> None:
        failure = f"data: {json.dumps({'error': {'message': 'out of memory'}})}\n\n"
        serve(page, answer("the first"), event({"content": "ha"}) + failure)
        page.locator("#compare").check()
        said(page, "go")
        expect(page.locator(".answer .text")).to_have_text(["the first", "ha"])
        expect(page.locator("#problem")).to_have_text("out of memory")
        assert page.locator(".outcome").inner_text() == ""

    def test_plain_decoding_does_not_race_with_itself(self, page: Page) -> None:
        bodies = serve(page, answer("a"))
        page.locator("#compare").check()
        settings(page, drafter="none")
        expect(page.locator("#compare")).to_be_disabled()
        said(page, "go")
        assert [one["foresay"]["drafter"] for one in bodies] == ["none"]
        expect(page.locator(".answer h2")).to_have_text(["plain"])
        settings(page, drafter="")
        expect(page.locator("#compare")).to_be_enabled()


class TestResult:
    def test_it_is_the_sentence_of_the_command_line(self, page: Page) -> None:
        plain = made("plain", 100, 101, 10)
        same = "both texts are the same."
        pays = sentence(page, made("speculation", 100, 40, 5), plain)
        assert pays == f"It pays here: the default drafter is 2.00x of plain decoding, one run each; {same}"
        slower = sentence(page, made("speculation", 100, 100, 12.5), plain, drafter="suffix")
        assert slower == f"Nothing gains here: suffix is 0.80x of plain decoding, one run each; {same}"

    def test_noise_is_marked_and_explained(self, page: Page) -> None:
        fast = made("speculation", 100, 60, 9.5)
        found = sentence(page, fast, made("plain", 100, 101, 10, spread=0.1))
        assert found.startswith(
            "The difference is noise: the default drafter is ~1.05x of plain decoding, one run each (~: "
        )
        assert "the halves of the plain run differ by 10%" in found
        assert "~" not in sentence(page, fast, made("plain", 100, 101, 10, spread=0.01))
        above = sentence(page, made("speculation", 100, 60, 2.5), made("plain", 100, 101, 10))
        assert "~4.00x" in above and "above its 1.68 tokens per pass" in above

    @pytest.mark.parametrize(
        ("times", "spread"),
        [([10] * 20, 0.0), ([10] * 10 + [20] * 10, 1.0), ([10] * 5, 1.0), ([0] * 20, 1.0)],
        ids=["even", "slower", "short", "at once"],
    )
    def test_the_spread_is_that_of_a_runs_halves(self, times: list[int], spread: float, page: Page) -> None:
        passes = [{"tokens": 1, "ms": sum(times[:i])} for i in range(len(times) + 1)]
        assert page.evaluate(f"spreadOf({json.dumps(passes)})") == pytest.approx(spread)


class TestContinued:
    def test_an_answer_that_was_cut_goes_on_where_it_ended(self, page: Page) -> None:
        bodies = serve(page, answer("one two", "length"), answer(" three"))
        said(page, "count", tokens=4)
        expect(page.locator(".figures")).to_contain_text("3 tokens (the limit)")
        page.get_by_role("button", name="Continue answer 1").click()
        expect(page.locator(".answer .text")).to_have_text("one two three")
        expect(page.locator(".figures")).to_contain_text("5 tokens ·")
        messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]
        assert bodies[1]["messages"] == messages and bodies[1]["continue_final_message"] is True
        assert "continue_final_message" not in bodies[0]
        assert page.get_by_role("button", name="Continue").count() == 0

    def test_both_answers_of_a_race_go_on(self, page: Page) -> None:
        bodies = serve(page, answer("a", "length"), answer("a", "length"), answer("b"))
        page.locator("#compare").check()
        said(page, "go")
        page.get_by_role("button", name="Continue answer 1").click()
        expect(page.locator(".answer .text")).to_have_text(["ab", "ab"])
        assert [one["foresay"].get("drafter") for one in bodies] == [None, "none", None, "none"]
        expect(page.locator(".outcome")).to_contain_text("oth texts are the same")

    def test_after_a_lost_connection_too(self, page: Page) -> None:
        serve(page, event({"content": "ha"}), answer("lf"))
        said(page, "go")
        page.get_by_role("button", name="Continue answer 1").click()
        expect(page.locator(".answer .text")).to_have_text("half")
