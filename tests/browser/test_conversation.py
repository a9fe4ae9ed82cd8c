"""The conversation on the page: kept, edited, regenerated, compared and stopped, and nothing that was written is lost."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from helpers.browsing import CHATS, TEXT, answer, begin, end, event, refuse, said, serve, settings
from helpers.serving import Running

STORED = "foresay.talk."
KEPT = """() => Object.entries(localStorage).filter(([key]) => key.startsWith("foresay.talk."))
    .map(([, text]) => JSON.parse(text))"""
"""The conversations in the browser's storage."""
MODELS = json.dumps({"data": [{"id": name, "root": name} for name in ("tiny", "other")]})


def words(page: Page) -> list[str]:
    return page.locator(".message .words").all_inner_texts()


def answers(page: Page) -> list[str]:
    return page.locator(".answer .text").all_inner_texts()


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).click()
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)


def reload(page: Page) -> None:
    """A new page of the same profile, as after the browser was closed."""
    page.reload()
    expect(page.locator("#model")).to_have_text("tiny")


class TestKept:
    def test_a_conversation_survives_a_reload_and_goes_on(self, page: Page) -> None:
        serve(page, answer("first *answer*"), answer("second answer"))
        page.locator("#compare").check()
        settings(page, system="be brief")
        said(page, "one", tokens=33)
        before = answers(page), page.locator(".figures").all_inner_texts(), page.locator(".outcome").inner_text()
        reload(page)
        after = answers(page), page.locator(".figures").all_inner_texts(), page.locator(".outcome").inner_text()
        assert before == after and words(page) == ["one"] and before[0] == ["first answer", "second answer"]
        assert page.locator("#compare").is_checked() and not page.locator("#origins").is_checked()
        assert (page.locator("#max_tokens").input_value(), page.locator("#system").input_value()) == ("33", "be brief")
        page.locator("#origins").check()
        assert answers(page) == ["first *answer*", "second answer"] and page.locator(".text .bonus").count() == 2
        page.unroute(CHATS)
        bodies = serve(page, answer("third"))
        said(page, "two")
        assert [(one["role"], one["content"]) for one in bodies[0]["messages"]] == [
            ("system", "be brief"),
            ("user", "one"),
            ("assistant", "first *answer*"),
            ("user", "two"),
        ]
        page.locator("#clear").click()
        reload(page)
        assert words(page) == [] and page.locator("#system").input_value() == "be brief"

    def test_a_reload_in_the_middle_keeps_what_was_written(self, page: Page) -> None:
        said(page, "one")
        begin(page)
        reload(page)
        assert words(page) == ["one", "go on"] and all(answers(page))

    def test_leaving_before_the_first_token_keeps_what_is_edited(self, page: Page) -> None:
        said(page, "one")
        said(page, "two")
        page.route(CHATS, lambda route: None)  # never answered
        page.get_by_role("button", name="Edit message 1").click()
        page.keyboard.press("Enter")
        expect(page.locator(".turn")).to_have_count(1)
        page.evaluate("dispatchEvent(new Event('pagehide'))")
        [kept] = page.evaluate(KEPT)
        assert [turn["text"] for turn in kept["turns"]] == ["one", "two"]

    @pytest.mark.parametrize("kept", ["{", '{"turns": [{"text": 5}]}', '{"turns": 1}', "[]", "one"])
    def test_what_cannot_be_read_is_reported_once_and_left_in_the_storage(self, kept: str, page: Page) -> None:
        said(page, "hello")
        [whole] = page.evaluate(KEPT)
        if kept == "one":
            kept = json.dumps({**whole, "id": "x", "turns": [{**whole["turns"][0], "sampling": {"seed": "no number"}}]})
        page.evaluate("([key, value]) => localStorage.setItem(key, value)", [STORED + "x", kept])
        reload(page)
        expect(page.locator("#problem")).to_contain_text("cannot be read")
        assert words(page) == ["hello"] and page.locator("#list li").count() == 1
        assert page.evaluate(f"localStorage['foresay.unreadable.{STORED}x']") == kept
        reload(page)
        assert words(page) == ["hello"] and page.locator("#problem").inner_text() == ""

    def test_a_full_storage_is_reported(self, page: Page) -> None:
        page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
        said(page, "hello")
        expect(page.locator("#problem")).to_contain_text("not kept")
        assert words(page) == ["hello"] and answers(page) != [""]

    def test_a_browser_without_storage_has_a_conversation(self, page: Page) -> None:
        none = "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('denied', 'SecurityError'); } });"
        page.add_init_script(none)
        reload(page)
        expect(page.locator("#problem")).to_contain_text("switched off")
        said(page, "one")
        said(page, "two")
        assert words(page) == ["one", "two"] and all(answers(page))

    def test_two_tabs_show_one_conversation(self, page: Page, server: Running) -> None:
        said(page, "hello")
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.locator(".words")).to_have_text("hello")
        said(page, "more")
        expect(other.locator(".words")).to_have_text(["hello", "more"])
        other.locator("#clear").click()
        said(page, "and more")
        expect(other.locator("#list button")).to_have_text("hello")
        assert words(other) == [], "a tab with another conversation stays there"
        other.close()

    def test_a_key_is_not_kept(self, page: Page) -> None:
        page.locator("#key").evaluate("e => { e.value = 'secret'; }")
        said(page, "hello")
        assert "secret" not in json.dumps(page.evaluate("() => ({...localStorage})"))


class TestModels:
    @staticmethod
    def two(page: Page) -> None:
        page.route("**/v1/models", lambda route: route.fulfill(content_type="application/json", body=MODELS))

    @pytest.fixture(autouse=True)
    def served(self, page: Page) -> None:
        self.two(page)
        page.reload()
        expect(page.locator("#model")).to_be_enabled()

    def test_a_message_goes_to_the_chosen_model_which_its_answers_name(self, page: Page) -> None:
        bodies = serve(page, answer("first"), answer("second"))
        said(page, "one")
        page.locator("#model").select_option("other")
        said(page, "two")
        page.locator("#model").select_option("tiny")
        press(page, "Race: plain, answer 2")
        assert [one["model"] for one in bodies] == ["tiny", "other", "other"], (
            "a comparison is a request to the same model"
        )
        titles = ["with speculation · tiny", "with speculation · other", "plain · other"]
        assert page.locator(".answer h2").all_inner_texts() == titles

    def test_a_message_waits_for_the_list_of_models(self, page: Page) -> None:
        page.locator("#model").select_option("other")
        page.route("**/v1/models", lambda route: route.abort())
        page.reload()
        expect(page.locator("#problem")).to_contain_text("cannot be reached")
        bodies = serve(page, answer("first"))
        said(page, "one")
        assert not bodies and page.locator("#prompt").input_value() == "one"
        page.unroute("**/v1/models")
        self.two(page)
        page.reload()
        said(page, "one")
        assert [one["model"] for one in bodies] == ["other"]

    def test_two_tabs_have_one_choice(self, page: Page, server: Running) -> None:
        other = page.context.new_page()
        other.route("**/v1/models", lambda route: route.fulfill(content_type="application/json", body=MODELS))
        other.goto(server.url)
        expect(other.locator("#model")).to_be_enabled()
        page.locator("#model").select_option("other")
        expect(other.locator("#model")).to_have_value("other")
        other.close()

    def test_the_choice_is_kept_while_the_server_has_the_model(self, page: Page) -> None:
        page.locator("#model").select_option("other")
        page.reload()
        expect(page.locator("#model")).to_have_value("other")
        page.unroute("**/v1/models")
        reload(page)
        expect(page.locator("#model")).to_be_disabled()
        bodies = serve(page, answer("first"))
        said(page, "one")
        assert "model" not in bodies[0] and page.locator(".answer h2").all_inner_texts() == ["with speculation"]


class TestChanged:
    def test_an_edited_message_replaces_what_followed(self, page: Page) -> None:
        bodies = serve(page, answer("a"), answer("b"), answer("c"))
        said(page, "one")
        said(page, "two")
        page.locator("#prompt").fill("not sent yet")
        page.get_by_role("button", name="Edit message 1").click()
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.locator("#prompt")).to_have_value("one")
        page.keyboard.press("Escape")
        expect(page.locator("#prompt")).to_have_value("not sent yet")
        expect(page.locator("#editing")).to_be_hidden()
        page.get_by_role("button", name="Edit message 1").click()
        said(page, " more")
        assert words(page) == ["one more"] and answers(page) == ["c"]
        assert bodies[-1]["messages"] == [{"role": "user", "content": "one more"}]
        expect(page.locator("#prompt")).to_have_value("not sent yet")

    def test_regenerating_replaces_the_last_answer(self, page: Page) -> None:
        bodies = serve(page, answer("a"), answer("b"), answer("c"))
        said(page, "one")
        said(page, "two")
        assert page.get_by_role("button", name="Regenerate").count() == 1
        settings(page, temperature="0.7")
        press(page, "Regenerate")
        assert words(page) == ["one", "two"] and answers(page) == ["a", "c"]
        assert bodies[1]["messages"] == bodies[2]["messages"] and bodies[2]["temperature"] == 0.7
        assert bodies[1]["seed"] != bodies[2]["seed"]

    def test_a_number_out_of_range_sends_nothing_and_is_shown(self, page: Page) -> None:
        bodies = serve(page, answer("a"))
        said(page, "one")
        settings(page, temperature="3")
        press(page, "Regenerate")
        expect(page.locator("#temperature")).to_be_focused()
        page.keyboard.press("Escape")
        page.locator("#prompt").fill("two")
        page.keyboard.press("Enter")
        assert len(bodies) == 1 and page.locator("#prompt").input_value() == "two"

    def test_an_empty_field_is_left_to_the_server_and_the_others_are_sent(self, page: Page) -> None:
        bodies = serve(page, answer("a"))
        settings(page, temperature="", top_p="0.9", top_k="40", min_p="0.05", repetition_penalty="1.1", seed="7")
        settings(page, drafter="suffix", length="4")
        said(page, "one", tokens=33)
        body = bodies[0]
        assert "temperature" not in body and (body["top_p"], body["top_k"], body["min_p"]) == (0.9, 40, 0.05)
        assert (body["repetition_penalty"], body["seed"], body["max_tokens"]) == (1.1, 7, 33)
        assert body["foresay"] == {"origins": True, "stats": True, "drafter": "suffix", "length": "4"}
        expect(page.locator(".answer h2")).to_have_text("with suffix")
        settings(page, drafter="", length="", seed="")
        said(page, "two")
        assert bodies[1]["foresay"] == {"origins": True, "stats": True} and bodies[1]["seed"] != 7


class TestCompared:
    def test_an_answer_is_compared_later_by_one_click(self, page: Page) -> None:
        settings(page, temperature="0")
        said(page, TEXT)
        said(page, "and then")
        settings(page, temperature="0.9")
        press(page, "Race: plain, answer 1")
        first = page.locator(".turn").first
        texts = first.locator(".text").all_inner_texts()
        assert len(texts) == 2 and texts[0] == texts[1] != "", "with the settings of the answer"
        assert first.get_by_role("button", name="Race").count() == 0
        expect(first.locator(".outcome")).to_contain_text("oth texts are the same.")

    def test_both_requests_are_the_same_but_for_the_drafter(self, page: Page) -> None:
        bodies = serve(page, answer("a"))
        page.locator("#compare").check()
        settings(page, temperature="0.5")
        said(page, "one")
        page.locator("#compare").uncheck()
        said(page, "two", tokens=30)
        settings(page, temperature="0.9")
        press(page, "Race: plain")
        for fast, plain in (bodies[:2], bodies[2:]):
            assert plain["foresay"].pop("drafter") == "none" and fast == plain and fast["seed"] >= 0
            assert fast["temperature"] == 0.5

    @pytest.mark.parametrize(
        ("temperature", "exact", "shown"),
        [
            ("0", True, "or this is an error"),
            ("0.5", True, "two draws from one distribution"),
            ("0", False, "acceptance rule is not exact"),
        ],
    )
    def test_a_difference_is_explained(self, temperature: str, exact: bool, shown: str, page: Page) -> None:
        serve(page, answer("a b", exact=exact), answer("a c"))
        page.locator("#compare").check()
        settings(page, temperature=temperature)
        said(page, "one")
        expect(page.locator(".outcome")).to_contain_text(shown)

    def test_an_answer_that_was_cut_off_is_not_compared(self, page: Page) -> None:
        serve(page, answer("a"), event({"content": "a"}) + "data: [DONE]\n\n")
        page.locator("#compare").check()
        said(page, "one")
        assert len(answers(page)) == 2 and page.locator(".outcome").inner_text() == ""


class TestRefused:
    def test_a_prompt_that_does_not_fit_stays_in_the_field(self, page: Page) -> None:
        said(page, "hello")
        long = "the number 7 and 8 and " * 1000
        page.locator("#prompt").fill(long)
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).to_contain_text("the model's context is 4096")
        expect(page.locator("#prompt")).to_have_value(long.strip())
        assert words(page) == ["hello"] and len(answers(page)) == 1
        page.locator("#prompt").fill("")
        said(page, "hello again")
        expect(page.locator("#problem")).to_have_text("")
        assert words(page) == ["hello", "hello again"]

    def test_a_refused_edit_keeps_the_conversation_and_the_edit(self, page: Page) -> None:
        said(page, "one")
        said(page, "two")
        refuse(page, "the server is full", 429)
        page.get_by_role("button", name="Edit message 1").click()
        said(page, " more")
        expect(page.locator("#problem")).to_have_text("the server is full")
        assert words(page) == ["one", "two"] and page.locator("#prompt").input_value() == "one more"
        expect(page.locator("#editing")).to_be_visible()
        reload(page)
        assert words(page) == ["one", "two"]

    def test_a_refused_regeneration_keeps_the_answer(self, page: Page) -> None:
        said(page, "one")
        before = answers(page)
        refuse(page, "the server is full", 429)
        press(page, "Regenerate")
        assert answers(page) == before and page.locator("#prompt").input_value() == ""
        press(page, "Race: plain")
        assert answers(page) == before and page.locator("#problem").inner_text() == "the server is full"

    def test_an_error_in_a_stream_keeps_what_was_written(self, page: Page) -> None:
        failure = f"data: {json.dumps({'error': {'message': 'out of memory'}})}\n\n"
        serve(page, failure, event({"content": "half"}) + failure)
        said(page, "one")
        assert words(page) == [] and page.locator("#prompt").input_value() == "one"
        page.locator("#prompt").press("Enter")
        expect(page.locator(".answer .text")).to_have_text("half")
        expect(page.locator("#problem")).to_have_text("out of memory")

    def test_a_server_that_is_gone(self, page: Page) -> None:
        page.route(CHATS, lambda route: route.abort())
        said(page, "one")
        expect(page.locator("#problem")).to_have_text("the server cannot be reached")
        assert page.locator("#prompt").input_value() == "one"

    def test_an_empty_answer_is_an_answer(self, page: Page) -> None:
        serve(page, end())
        said(page, "one")
        assert words(page) == ["one"] and answers(page) == [""] and page.locator("#problem").inner_text() == ""


class TestStopped:
    @pytest.mark.parametrize("by", ["Escape", "#stop"])
    def test_a_stop_keeps_what_was_written_and_frees_the_row(self, by: str, page: Page, server: Running) -> None:
        page.locator("#compare").check()
        begin(page)
        page.locator("#stop").click() if by == "#stop" else page.keyboard.press(by)
        expect(page.locator("#send")).to_be_enabled(timeout=10_000)
        assert len(answers(page)) == 1 and words(page) == ["go on"] and page.locator("#problem").inner_text() == ""
        page.wait_for_timeout(500)
        assert server.count("requests_running") == 0

    def test_a_new_chat_ends_the_running_answer(self, page: Page) -> None:
        begin(page)
        page.locator("#clear").click()
        said(page, "hello")
        assert words(page) == ["hello"] and len(answers(page)) == 1
        assert page.locator("#prompt").input_value() == ""

    def test_the_end_of_an_old_request_leaves_the_new_one_alone(self, page: Page) -> None:
        begin(page)
        page.evaluate("() => { at('clear').click(); at('prompt').value = 'anew'; at('form').requestSubmit(); }")
        expect(page.locator(".text > *").first).to_be_visible(timeout=30_000)
        assert words(page) == ["anew"] and page.locator("#stop").is_enabled()
        page.keyboard.press("Escape")
        expect(page.locator("#send")).to_be_enabled(timeout=10_000)
        assert words(page) == ["anew"] and len(answers(page)) == 1
