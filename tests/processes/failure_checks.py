"""Checks what ranks of any launcher say when a job goes wrong; run by the tests of each."""


class FailureChecks:
    """For a TestCase with run_job(failure, **environment), which returns {rank: its last message}. It waits a minute, where
    the job's own deadline is ten."""

    def test_checked_mode_shows_both_sides_on_all_ranks(self):
        messages = self.run_job("disagree", FSDP_CHECKED="1")
        self.assertEqual(sorted(messages), [0, 1, 2])
        for message in messages.values():
            self.assertIn("all_gather 'blocks.3' of 96 bytes of Float", message)
            self.assertIn("all_reduce (sum) 'blocks.4' of 16 bytes of Half", message)

    def test_unchecked_mode_notices_sizes_and_points_to_checked_mode(self):
        messages = self.run_job("counts")
        self.assertEqual(sorted(messages), [0, 1, 2])
        for message in messages.values():
            self.assertIn("FSDP_CHECKED=1", message)

    def test_an_operation_fails_with_the_error_of_what_it_follows(self):
        messages = self.run_job("follow", FSDP_CHECKED="1")
        self.assertEqual(sorted(messages), [0, 1, 2])
        for message in messages.values():
            self.assertIn("all_gather 'blocks.3' of 96 bytes", message)
            self.assertIn("all_gather 'blocks.3' of 108 bytes", message)

    def test_message_of_a_failing_rank_reaches_all_others(self):
        messages = self.run_job("fail")
        self.assertEqual(messages[2], "no space left for blocks.7")
        for rank in (0, 1):
            self.assertEqual(messages[rank], "rank 2 failed: no space left for blocks.7")
