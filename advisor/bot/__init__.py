"""The pull-request bot: forges, webhooks, git, the sandbox, and the policy that joins them."""
