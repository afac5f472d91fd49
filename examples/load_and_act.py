"""Load a checkpoint and use its policy on your own observations and in an environment."""

from functools import partial

import numpy as np
from torch.optim import Adam

from mtrl_lightning import SAC, Temperature, ToyReach, evaluate, load_policy, train
from mtrl_lightning.networks import MLP

if __name__ == "__main__":
    small = partial(MLP, width=64, depth=2)
    adam = partial(Adam, lr=1e-3)
    agent = partial(
        SAC,
        actor=small,
        critic=small,
        temperature=partial(Temperature, initial=0.1),
        actor_optimizer=adam,
        critic_optimizer=adam,
    )
    tasks = ToyReach()
    run = train(tasks, agent, total_steps=6_000, data={"batch_size": 96}, num_workers=0, name="toy")

    policy = load_policy(run.checkpoint)  # needs neither a trainer nor the benchmark
    print(policy.task_names, policy.env_steps)
    print(policy.act([0.5, -0.5], "goal-1"))  # one observation, a task by name
    print(policy.act(np.zeros((2, 2)), [0, 2]))  # a batch, tasks by index
    print(policy.act([0.5, -0.5], "goal-1", mode="explore"))  # a sample from the policy

    env = tasks.make_env(task=1, split="eval", seed=0)
    observation, info = env.reset(seed=0)
    success = done = False
    while not done:
        action = policy.act(observation, "goal-1")
        observation, reward, terminated, truncated, info = env.step(action)
        success |= bool(info["success"])
        done = terminated or truncated
    print("success" if success else "no success")

    print(evaluate(policy, tasks, num_episodes=5, num_workers=0)["eval/success"])
