"""Git: a private mirror of a repository, commits without a work tree, pushes of the bot's branches."""
