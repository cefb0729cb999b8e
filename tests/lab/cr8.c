// SPDX-License-Identifier: GPL-2.0
/*
 * Lab only. The emulated processor aborts when a guest of the emulated host writes CR8 while a virtual
 * interrupt is pending, unless the host intercepts the write. KVM turns the interception on and off as it
 * goes (svm_update_cr8_intercept, starting from on); this module makes that function return at once, so it stays on.
 */
#include <linux/kprobes.h>
#include <linux/module.h>

static void keep_intercept(void)
{
}

static int skip_function(struct kprobe *probe, struct pt_regs *registers)
{
	/* Continue in an empty function: it returns to the caller of the probed one. */
	registers->ip = (unsigned long)keep_intercept;
	return 1;
}

static struct kprobe probe = {
	.symbol_name = "svm_update_cr8_intercept",
	.pre_handler = skip_function,
};

static int __init keep_cr8_init(void)
{
	return register_kprobe(&probe);
}

static void __exit keep_cr8_exit(void)
{
	unregister_kprobe(&probe);
}

module_init(keep_cr8_init);
module_exit(keep_cr8_exit);
MODULE_DESCRIPTION("Keeps KVM's CR8-write interception on");
MODULE_LICENSE("GPL");
