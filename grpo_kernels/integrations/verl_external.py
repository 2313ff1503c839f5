"""Importing this module patches verl. It is the name to give to verl's hooks, which import a module in each worker:

VERL_USE_EXTERNAL_MODULES=grpo_kernels.integrations.verl_external, or actor_rollout_ref.model.external_lib in verl's configuration.
"""

from grpo_kernels.integrations.verl import patch_verl

patch_verl()
