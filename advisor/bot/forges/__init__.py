"""GitHub and GitLab behind the one protocol of `advisor.bot.forge`."""
